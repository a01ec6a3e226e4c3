"""A run that is killed by a real SIGKILL at a rename can be gone on with: before any, and after one of each kind."""

import re
from pathlib import Path

from apps.grpo.tests.kill_test import DONE, Whole, kill_at_each, whole  # noqa: F401


def test_a_kill_before_any_other_rename(whole: Whole, tmp_path: Path) -> None:  # noqa: F811
    numbers = [number for number, name in enumerate(whole[1]) if name not in DONE]
    kill_at_each(numbers, "before", whole, tmp_path)


def test_a_kill_after_a_rename_of_each_kind(whole: Whole, tmp_path: Path) -> None:  # noqa: F811
    """After one is just before the next, but for what is being written."""
    last_of_kind = {re.sub(r"\d", "", name): number for number, name in enumerate(whole[1])}
    kill_at_each(last_of_kind.values(), "after", whole, tmp_path)

"""A run that is killed by a real SIGKILL just after a rename can be gone on with: once for files of a kind."""

import re
import signal
from pathlib import Path

from apps.common.testing.process_kills import run_in_child
from apps.grpo.tests.kill_test import Whole, assert_same_end, go, whole  # noqa: F401


def test_a_kill_after_any_rename(whole: Whole, tmp_path: Path) -> None:  # noqa: F811
    whole_dir, renames = whole
    last_of_kind = {re.sub(r"\d", "", name): number for number, name in enumerate(renames)}
    for name, number in last_of_kind.items():
        run_dir = tmp_path / str(number)
        assert run_in_child(go, run_dir, kill_at=number, when="after") == -signal.SIGKILL, name
        assert run_in_child(go, run_dir) == 0, name
        assert_same_end(run_dir, whole_dir)

"""A disk that is full amid a run: one line that names the directory, and how the run goes on."""

from pathlib import Path

import pytest

from apps.common.cli import command_line as cli
from apps.common.testing.small_disk import assert_one_line, has_namespaces, run_on_small_disk
from apps.grpo import run as run_module
from apps.grpo.main import main

GRPO = (
    "--max-steps 2 --save-every 1 --eval-every 2 --eval-prompts 4 --warm-start.steps 2 "
    "--warm-start.eval-prompts 4 --prompts-per-step 2 --group-size 2"
)


@pytest.mark.skipif(not has_namespaces(), reason="no namespace of its own for mounts")
@pytest.mark.parametrize(
    ("size", "what", "then"),
    [
        ("1500k", "the export", "--resume --run-dir DISK/run goes on from the start"),
        ("4m", "", "--resume --run-dir DISK/run goes on from"),
    ],
)
def test_a_full_disk_is_one_line(tmp_path: Path, size: str, what: str, then: str) -> None:
    assert run_module  # imported before the child is forked
    words = [*GRPO.split(), "--run-dir", f"{tmp_path}/disk/run"]
    assert_one_line(run_on_small_disk(tmp_path, size, lambda: cli.main(lambda: main(words))), tmp_path, what, then)

"""Two ranks, each with a disk of its own: what a resumed run takes over, and what is told where files are lost."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from apps.common.run.checkpoints import checkpoint_path, last_checkpoint
from apps.common.run.separate_disks import join_disks
from engines.launch import launch
from engines.storage.checkpoint import save_checkpoint


def disk(folder: Path) -> Path:
    """This rank's run directory, as if it were a machine of its own."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    return folder / f"disk{dist.get_rank()}"


def save(folder: Path, steps: tuple[int, ...]) -> None:
    for step in steps:
        state = {"model": {"weight": torch.full((3,), float(step))}}
        save_checkpoint(checkpoint_path(disk(folder), step), state, {"step": step})


def resume(folder: Path) -> int:
    run_dir = disk(folder)
    join_disks(run_dir, resume=True)
    return (last_checkpoint(run_dir) or (0, None))[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two disks with the checkpoints of steps 2 and 4."""
    launch(save, (tmp_path, (2, 4)), 2, timeout_seconds=60)
    for number in (0, 1):
        (tmp_path / f"disk{number}/metrics.jsonl").write_text(f"of {number}\n")
    return tmp_path


def test_without_a_word_of_who_was_first_rank_0_is(folder: Path) -> None:
    """As after a run on one machine; then each disk says which was."""
    assert launch(resume, (folder,), 2, timeout_seconds=60) == 4
    assert (folder / "disk1/metrics.jsonl").read_text() == "of 0\n"
    assert '"first": true' in (folder / "disk0/machine.json").read_text()
    assert '"first": false' in (folder / "disk1/machine.json").read_text()


def test_a_newer_checkpoint_that_is_not_whole_is_set_aside(folder: Path) -> None:
    """A machine was killed before it had its part in place; nothing is deleted."""
    checkpoint_path(folder / "disk1", 4).rename(folder / "disk1/checkpoints/step-000004.writing")
    assert launch(resume, (folder,), 2, timeout_seconds=60) == 2
    assert (folder / "disk0/checkpoints/step-000004.incomplete-0/random_0.pt").is_file()


def test_a_run_without_a_whole_checkpoint_is_refused(folder: Path) -> None:
    """Both lost a file that the machine which is not here may have: all stays as it is."""
    for step in (2, 4):
        (checkpoint_path(folder / "disk1", step) / "random_1.pt").unlink()
    before = sorted(folder.rglob("*"))
    with pytest.raises(ValueError, match=r"lack random_1\.pt of the checkpoint of step 4, and have no older one whole"):
        launch(resume, (folder,), 2, timeout_seconds=60)
    assert sorted(folder.rglob("*")) == before

"""Which errors are those of a full disk, by a limit of the kernel on the size of files."""

import errno
import resource
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from apps.common.run.config_file import CONFIG_NAME
from apps.common.run.full_disk import FullDiskError, is_full, named_by_rank, writing
from apps.common.run.reporter import Reporter
from engines.launch import RankError


def as_bytes(path: Path) -> None:
    path.write_bytes(bytes(10**6))


def as_torch(path: Path) -> None:
    torch.save(torch.zeros(10**6), path)


def as_safetensors(path: Path) -> None:
    save_file({"a": torch.zeros(10**6)}, path)


def as_log(path: Path) -> None:
    with Reporter(path.parent, {}, 9999, "sft") as log:
        for step in range(9999):
            log.step(step, {"x": step}, {})


def limited(write: Callable[[Path], None], path: Path, said: Any) -> None:
    """The child: no file may grow over 5,000 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    try:
        with writing("a file", path.parent):
            write(path)
    except FullDiskError as error:
        said.send(str(error))
    said.close()


@pytest.mark.parametrize("write", [as_bytes, as_torch, as_safetensors, as_log])
def test_every_writer_is_told(tmp_path: Path, write: Callable[[Path], None]) -> None:
    context = get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    child = context.Process(target=limited, args=(write, tmp_path / "a", theirs))
    child.start()
    theirs.close()
    what = "the metrics" if write is as_log else "a file"
    assert mine.recv().startswith(
        f"no space is left on the disk of {tmp_path}: {what} could not be written. Make room; "
    )
    child.join()


def test_other_errors_pass_and_a_full_disk_is_found_in_their_causes(tmp_path: Path) -> None:
    for error in (OSError(errno.EIO, "input/output error"), RuntimeError("no"), ValueError("no")):
        with pytest.raises(type(error)) as raised, writing("a file", tmp_path):
            raise error
        assert raised.value is error
        assert not is_full(error)
    outer = RuntimeError("failed")
    outer.__cause__ = OSError(errno.ENOSPC, "no")
    assert is_full(outer)


def test_the_outer_line_stays_and_is_read_from_a_rank(tmp_path: Path) -> None:
    both = writing("the outer", tmp_path), writing("the inner", tmp_path)
    with pytest.raises(FullDiskError, match="the inner") as raised, both[0], both[1]:
        raise OSError(errno.ENOSPC, "No space left on device")
    quoted = named_by_rank(RankError(f"rank 1 failed:\nx\napps.full_disk.FullDiskError: {raised.value}\n"))
    assert str(quoted) == str(raised.value)
    assert named_by_rank(RankError("rank 1 failed:\nValueError: x")) is None


def test_a_warm_start_is_resumed_with_its_run(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "warm-start"):
        folder.mkdir(exist_ok=True)
        (folder / CONFIG_NAME).write_text("{}")
    with pytest.raises(FullDiskError, match=f"--run-dir {tmp_path} goes on"), writing("x", tmp_path / "warm-start"):
        raise OSError(errno.ENOSPC, "No space left on device")

"""Three ranks on two disks: files travel, checkpoints are parted and read again with the disks in another order."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from engines.launch import launch
from engines.storage.checkpoint import load_checkpoint, save_checkpoint
from engines.storage.disks import Disks, find_disks, mirror_files, share_files

ORDER = (0, 1, 1)
"""The disk of each rank."""
STATE = {"model": {"layers.0.weight": torch.arange(30.0).reshape(6, 5), "norm": torch.arange(6.0)}}


def as_machines(work: Callable[..., Any], folder: Path, order: tuple[int, ...], *args: Any) -> Any:
    """Run `work` on a rank as if each disk were a machine of its own, in the folder that is its disk."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    disk = folder / f"disk{order[dist.get_rank()]}"
    disk.mkdir(exist_ok=True)
    return work(disk, *args)


def run(work: Callable[..., Any], folder: Path, *args: Any, order: tuple[int, ...] = ORDER) -> Any:
    return launch(as_machines, (work, folder, order, *args), len(order), timeout_seconds=300)


def placed(disk: Path) -> tuple[Disks, list[str]]:
    disks = find_disks(disk / "new")
    dist.barrier()
    return disks, os.listdir(disk / "new")


def test_ranks_of_one_disk_find_each_other(tmp_path: Path) -> None:
    """By marks that are gone afterwards."""
    disks, left = run(placed, tmp_path)
    assert disks.leaders == (0, 1, 1)
    assert disks.several
    assert (disks.leads, disks.own) == (True, [0])
    assert left == []
    assert not run(placed, tmp_path, order=(0, 0, 0))[0].several


def shared(disk: Path, contents: dict[int, dict[str, bytes]]) -> None:
    for name, content in contents.get(dist.get_rank(), {}).items():
        (disk / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (disk / "files" / name).write_bytes(content)
    share_files(disk / "files", find_disks(disk))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_files_of_one_disk_reach_the_other(tmp_path: Path) -> None:
    """In both directions, folders and an empty file too, and one that is larger than what travels at once."""
    large = os.urandom((32 << 20) + 5)
    run(shared, tmp_path, {0: {"a": b"one", "deep/b": large, "none": b""}, 2: {"c": b"three", "a": b"one"}})
    assert files(tmp_path / "disk0/files") == {"a": b"one", "deep/b": large, "none": b"", "c": b"three"}
    assert files(tmp_path / "disk1/files") == files(tmp_path / "disk0/files")


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    """Of the same size: by their hashes."""
    with pytest.raises(RuntimeError, match=r"files/model is not the same on .*: delete it on one of them"):
        run(shared, tmp_path, {0: {"model": b"one"}, 1: {"model": b"two"}})


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """On every rank, and nobody waits for the one that failed."""
    with pytest.raises(RuntimeError, match=r"files/a(/b)? can't be written"):  # of either: both fail
        run(shared, tmp_path, {0: {"a/b": b"one", "z": b"more"}, 1: {"a": b"a file where a folder should be"}})
    assert files(tmp_path / "disk1/files")["z"] == b"more"


def mirrored(disk: Path) -> None:
    mirror_files(disk, find_disks(disk), 2, skip=["own"])


def test_a_mirror_is_what_its_source_is(tmp_path: Path) -> None:
    """But for what is skipped."""
    for number in (0, 1):
        (tmp_path / f"disk{number}/own").mkdir(parents=True)
        (tmp_path / f"disk{number}/own/shard").write_text(str(number))
        (tmp_path / f"disk{number}/log").write_text("line\n" * (number + 1))
    (tmp_path / "disk0/old").write_text("of an earlier start")
    run(mirrored, tmp_path)
    assert files(tmp_path / "disk0") == {"own/shard": b"0", "log": b"line\nline\n"}


def state_of(value: float) -> dict[str, Any]:
    """Rows over the ranks, and a tensor that all have."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = STATE["model"]["layers.0.weight"] * value
    return {
        "model": {
            "layers.0.weight": distribute_tensor(weight, mesh, [Shard(0)]),
            "norm": STATE["model"]["norm"] * value,
        }
    }


def saved(disk: Path) -> None:
    save_checkpoint(disk / "run/step", state_of(1.0), {"step": 3})


def loaded(disk: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    state = state_of(0.0)
    facts = load_checkpoint(disk / "run/step", state)
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state["model"].items()}, facts


def test_a_checkpoint_is_parted_and_read_in_another_order(tmp_path: Path) -> None:
    """Each disk has the shards of its ranks; then ranks, disks and their number change."""
    run(saved, tmp_path)
    parts = [{path.name for path in (tmp_path / f"disk{n}/run/step").iterdir()} for n in (0, 1)]
    assert parts[0] & parts[1] == {".metadata", "engine.json"}
    assert "random_0.pt" in parts[0]
    assert {"random_1.pt", "random_2.pt"} <= parts[1]
    for order in ((1, 1, 0), (1, 0), (0, 1)):
        state, facts = run(loaded, tmp_path, order=order)
        assert facts["step"] == 3
        for name, tensor in STATE["model"].items():
            assert torch.equal(state[name], tensor), (order, name)


def test_a_shard_that_no_disk_has_is_named(tmp_path: Path) -> None:
    run(saved, tmp_path)
    (tmp_path / "disk1/run/step/random_2.pt").unlink()
    with pytest.raises(ValueError, match=r"random_2\.pt is missing"):
        run(loaded, tmp_path)

"""Checkpoints of a sharded state in torch's distributed format: written in a temporary place, then put in place.

To write one:

1. Rank 0 makes the temporary directory, as does the first rank of each further disk.
2. Every rank writes its shards (torch's distributed checkpoint) and its random state, and hashes the files it wrote.
3. The first rank of each disk writes the manifest with the hashes of all ranks, last, and puts the directory in place.

After each part the ranks tell each other whether it failed, so that an error of one is an error of all. To read one,
the manifest and all files are checked first; nothing is changed by a checkpoint that is refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from engines.devices.detect import accelerators_here
from engines.storage.directories import existing, fresh_temporary, repeat_directory, replace_directory, temporary_of
from engines.storage.disks import Disks, find_disks, share_files
from engines.storage.manifest import check_files, hash_files, read_manifest, write_manifest
from engines.storage.together import Group, gathered, this_rank, this_world_size, together
from seqpack.comm.collectives import broadcast_bytes, gather_plain

_INDEX = ".metadata"  # of torch's format: which file has which part of which tensor
OPTIMIZERS = {"adamw": "exp_avg", "muon": "momentum_buffer"}
"""A moment that tells each optimizer of `EngineConfig.optimizer`, for a matrix."""
Check = Callable[[Path, Mapping[str, Any]], None]
"""A check of a whole checkpoint and its facts, before anything is read; it raises ValueError to refuse it."""


def save_checkpoint(
    directory: Path,
    state: dict[str, Any],
    metadata: Mapping[str, Any],
    random: Mapping[str, Any] | None = None,
    group: Group = None,
    also: Sequence[Path] = (),
) -> None:
    """Write `state` (nested dicts with "model" and perhaps "optimizer"), random states and `metadata` (plain JSON).

    Collective. The directory appears, or is replaced, only when everything is on disk. `random`: what `random_state`
    gave, by default now. `group`: the ranks, on a backend of the CPU where another thread has collectives of its own.
    `also`: directories that hold the same afterwards; each appears when those before it are whole.
    RuntimeError where a rank cannot write.
    """
    temporary, disks = temporary_of(directory), find_disks(directory.parent, group)
    together(group, lambda: fresh_temporary(directory) if disks.leads else None)
    with _own_errors():
        dcp.save(state, checkpoint_id=str(temporary), process_group=group)
    hashes = together(group, lambda: _write_own(temporary, random or random_state()))
    files = {name: entry for own in hashes for name, entry in own.items()}
    own = {"world_size": this_world_size(), "optimizer": "optimizer" in state}
    _share_index(temporary, disks, group)
    here = [name for rank in disks.own for name in hashes[rank]]

    def finish() -> None:
        if disks.leads:
            write_manifest(temporary, {**metadata, **own}, files, {*here, _INDEX})
            replace_directory(temporary, directory)
            for further in also:
                repeat_directory(directory, further)

    together(group, finish)


def load_checkpoint(
    directory: Path, state: dict[str, Any], parts: Group = None, check: Check | None = None
) -> dict[str, Any]:
    """Read into `state` in place what `save_checkpoint` wrote, and return its facts. Collective.

    Weights and moments fit any world size; random states are restored on the same one. `parts`: the ranks whose
    states together hold the model (the stages of a pipeline), where one rank's does not. `check`: what else there is
    to refuse. ValueError for a directory that is no checkpoint, is damaged, or whose tensors are not those of the
    model; `state` is then as it was.
    """
    disks = find_disks(directory.parent)
    source = directory if disks.several else existing(directory)
    share_files(source, disks, hashed=False)
    metadata, files = read_manifest(source)
    if "optimizer" in state and not metadata["optimizer"]:
        raise ValueError(f"{directory} holds no optimizer: load it into an engine built with trainable=False")
    names = sorted(files)[disks.own.index(this_rank()) :: len(disks.own)]  # each rank of a disk reads some of them
    for problem in gathered(None, check_files(source, files, names)):
        if problem is not None:
            raise ValueError(problem)
    _check_tensors(source, state, _shapes(state["model"], parts))
    if check is not None:
        check(source, metadata)
    wanted = dict(state)
    if "optimizer" in state:
        # Rates, decay and the like (`param_groups`) are those of the run that goes on: its moments are read.
        wanted["optimizer"] = {key: value for key, value in state["optimizer"].items() if key != "param_groups"}
    with _own_errors():
        dcp.load(wanted, checkpoint_id=str(source))
    if metadata["world_size"] == this_world_size():
        _set_random_state(torch.load(source / _random_file()))
    gathered(None, None)
    return metadata


def read_tensor(directory: Path, part: str, name: str, into: torch.Tensor) -> torch.Tensor:
    """Read one tensor of a checkpoint, whole, into `into`, and return it. Collective."""
    with _own_errors():
        dcp.load({part: {name: into}}, checkpoint_id=str(directory))
    return into


def random_state() -> dict[str, Any]:
    """Return the states of torch's generators on this rank."""
    return {"cpu": torch.get_rng_state()} | {devices.kind: devices.random_state() for devices in accelerators_here()}


def _write_own(temporary: Path, random: Mapping[str, Any]) -> dict[str, dict[str, int | str]]:
    """Write this rank's random state, and return the hashes of all files that it wrote."""
    torch.save(dict(random), temporary / _random_file())
    written = [path.name for path in temporary.glob(f"__{this_rank()}_*")]
    shared = [_INDEX] if this_rank() == 0 else []
    return hash_files(temporary, [*written, _random_file(), *shared])


def _share_index(temporary: Path, disks: Disks, group: Group) -> None:
    """Write the index, which the coordinator alone has, to the disks of the others too."""
    if not disks.several:
        return
    index = broadcast_bytes((temporary / _INDEX).read_bytes() if this_rank() == 0 else b"", group=group)
    write = disks.leads and this_rank() > 0
    together(group, lambda: (temporary / _INDEX).write_bytes(index) if write else None)


def _random_file() -> str:
    return f"random_{this_rank()}.pt"


def _shapes(model: Mapping[str, torch.Tensor], parts: Group) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the model, by name."""
    own = {name: tuple(tensor.shape) for name, tensor in model.items()}
    if parts is None:
        return own
    return {name: shape for shapes in gather_plain(own, parts) for name, shape in shapes.items()}


def _check_tensors(directory: Path, state: Mapping[str, Any], model: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError naming the first tensor that is not in both, or whose shape or dtype differs."""
    entries = dcp.FileSystemReader(str(directory)).read_metadata().state_dict_metadata
    saved = {
        name.removeprefix("model."): entry
        for name, entry in entries.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    other = f"{directory} is a checkpoint of another model"
    build = "build the engine from the model that was trained"
    for name in sorted(saved.keys() ^ model.keys()):
        sides = ("the checkpoint", "this model") if name in saved else ("this model", "the checkpoint")
        raise ValueError(f"{other}: {name} is in {sides[0]} and not in {sides[1]}; {build}")
    for name, shape in model.items():
        if (size := tuple(saved[name].size)) != shape:
            raise ValueError(f"{other}: {name} has shape {size} in the checkpoint and {shape} in this model; {build}")
    if "optimizer" not in state:
        return  # a reference may well be kept in a smaller dtype
    for name, tensor in state["model"].items():
        if (dtype := saved[name].properties.dtype) != tensor.dtype:
            raise ValueError(
                f"{directory}: {name} is {dtype} in the checkpoint and {tensor.dtype} here: set master_dtype to what "
                "it was trained with"
            )
    for name, moments in state["optimizer"].get("state", {}).items():
        for key in moments:
            if f"optimizer.state.{name}.{key}" not in entries:
                for optimizer, other in OPTIMIZERS.items():
                    if f"optimizer.state.{name}.{other}" in entries:
                        raise ValueError(
                            f"{directory} has {other} of {name} and no {key}: it was trained with optimizer "
                            f"{optimizer!r}: set optimizer={optimizer!r}, or begin anew from an export of its weights"
                        )
                raise ValueError(f"{directory} has no {key} of {name}: other parameters were trained; {build}")


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    for devices in accelerators_here():
        if devices.kind in state:
            devices.set_random_state(state[devices.kind])


@contextmanager
def _own_errors() -> Iterator[None]:
    """Turn torch's CheckpointException, which is no Exception, into a RuntimeError."""
    try:
        yield
    except CheckpointException as error:
        for cause in error.failures.values():
            if isinstance(cause[0], (KeyboardInterrupt, SystemExit)):
                raise  # somebody ended the program
        raise RuntimeError(f"torch's distributed checkpoint failed: {error}") from error

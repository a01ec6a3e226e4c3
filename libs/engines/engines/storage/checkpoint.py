"""Checkpoints of a sharded state in torch's distributed format: written in a temporary place, then put in place."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from engines.storage.directories import existing, fresh_temporary, replace_directory, temporary_of

_FACTS = "engine.json"


def save_checkpoint(directory: Path, state: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Write `state` (nested dicts with "model" and perhaps "optimizer"), random states and `facts` (plain JSON).

    Collective. The directory appears, or is replaced, only when everything is on disk.
    """
    if _rank() == 0:
        fresh_temporary(directory)
    _barrier()
    temporary = temporary_of(directory)
    dcp.save(state, checkpoint_id=str(temporary))
    torch.save(_random_state(), temporary / f"random_{_rank()}.pt")
    _barrier()
    if _rank() == 0:
        own = {"world_size": _world_size(), "optimizer": "optimizer" in state}
        (temporary / _FACTS).write_text(json.dumps({**facts, **own}))
        replace_directory(temporary, directory)
    _barrier()


def load_checkpoint(directory: Path, state: dict[str, Any], parts: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Read into `state` in place what `save_checkpoint` wrote, and return its facts. Collective.

    Weights and optimizer fit any world size; random states are restored on the same one. `parts`: the ranks whose
    states together hold the model (the stages of a pipeline), where one rank's does not. ValueError for a directory
    that is no checkpoint, or one whose tensors are not those of the model.
    """
    found = existing(directory)
    if not (found / _FACTS).is_file():
        raise ValueError(f"{directory} is not a checkpoint of an engine: it has no {_FACTS} (was the writer killed?)")
    facts: dict[str, Any] = json.loads((found / _FACTS).read_text())
    if "optimizer" in state and not facts["optimizer"]:
        raise ValueError(f"{directory} holds no optimizer: load it into an engine built with trainable=False")
    _check_tensors(found, _shapes(state["model"], parts))
    dcp.load(state, checkpoint_id=str(found))
    if facts["world_size"] == _world_size():
        _set_random_state(torch.load(found / f"random_{_rank()}.pt"))
    _barrier()
    return facts


def _shapes(model: Mapping[str, torch.Tensor], parts: dist.ProcessGroup | None) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the model, by name."""
    own = {name: tuple(tensor.shape) for name, tensor in model.items()}
    if parts is None:
        return own
    every: list[Any] = [None] * dist.get_world_size(parts)
    dist.all_gather_object(every, own, group=parts)
    return {name: shape for shapes in every for name, shape in shapes.items()}


def _check_tensors(directory: Path, model: Mapping[str, tuple[int, ...]]) -> None:
    """ValueError naming the first tensor that checkpoint and model do not share, or whose shapes differ."""
    entries = dcp.FileSystemReader(str(directory)).read_metadata().state_dict_metadata
    saved = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in entries.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    for name in sorted(saved.keys() ^ model.keys()):
        sides = ("the checkpoint", "this model") if name in saved else ("this model", "the checkpoint")
        raise ValueError(
            f"{directory} is a checkpoint of another model: {name} is in {sides[0]} and not in {sides[1]}; build the "
            "engine from the model that was trained"
        )
    for name, shape in model.items():
        if saved[name] != shape:
            raise ValueError(
                f"{directory} is a checkpoint of another model: {name} has shape {saved[name]} in the checkpoint and "
                f"{shape} in this model; build the engine from the model that was trained"
            )


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()

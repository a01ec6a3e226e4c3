"""Checkpoints of a sharded module and its optimizer, in torch's distributed format: written beside, then renamed."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

_FACTS = "engine.json"


def save_checkpoint(directory: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None, step: int) -> None:
    """Collective. The directory appears, or is replaced, only when everything is on disk."""
    beside = directory.with_name(directory.name + ".writing")
    if dist.get_rank() == 0:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    dist.barrier()
    dcp.save(_state(module, optimizer), checkpoint_id=str(beside))
    torch.save(_random_state(), beside / f"random_{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        facts = {"step": step, "world_size": dist.get_world_size(), "optimizer": optimizer is not None}
        (beside / _FACTS).write_text(json.dumps(facts))
        replace_directory(beside, directory)
    dist.barrier()


def load_checkpoint(directory: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Collective; the step that was saved. Weights and optimizer fit any world size, random states only the same
    one."""
    if not (directory / _FACTS).is_file():
        raise ValueError(f"{directory} is not a checkpoint of an engine: it has no {_FACTS} (was the writer killed?)")
    facts = json.loads((directory / _FACTS).read_text())
    if optimizer is not None and not facts["optimizer"]:
        raise ValueError(f"{directory} holds no optimizer: load it into an engine built with trainable=False")
    state = _state(module, optimizer)
    dcp.load(state, checkpoint_id=str(directory))
    if optimizer is not None:
        set_optimizer_state_dict(module, optimizer, state["optimizer"])
    if facts["world_size"] == dist.get_world_size():
        _set_random_state(torch.load(directory / f"random_{dist.get_rank()}.pt"))
    dist.barrier()
    return int(facts["step"])


def replace_directory(source: Path, target: Path) -> None:
    """Put source where target is (or is to be): a reader finds the old or the new one, whole."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(source, target)
    shutil.rmtree(old, ignore_errors=True)


def _state(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Live tensors by name (tied weights once); loading writes into them."""
    tensors = dict(module.named_parameters()) | {
        name: value for name, value in module.named_buffers() if name in module.state_dict()
    }
    state: dict[str, Any] = {"model": {name: tensor.detach() for name, tensor in tensors.items()}}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(module, optimizer)
    return state


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])

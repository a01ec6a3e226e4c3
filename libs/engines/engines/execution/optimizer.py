"""AdamW with decay on matrices alone, or Muon beside it, and gradient clipping over local shards."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engines.config import EngineConfig
from engines.execution.bfloat16_adamw import BFloat16AdamW
from engines.execution.host_adamw import HostAdamW
from engines.execution.learning_rates import LR_SCALE, scale_of
from engines.execution.muon import MUON, Held, MatrixUpdates, Place, with_matrices
from engines.execution.reductions import reduce_float64
from engines.muon.matrices import muon_matrices
from engines.private_api import foreach_mul, foreach_norm
from engines.weights.box import Box
from engines.weights.row_shards import counts_once
from engines.weights.shard_export import rows_held

DECAYS = "decays"
"""Key of an optimizer's group: 1 where weights decay, else 0."""


def build_optimizer(
    module: nn.Module,
    config: EngineConfig,
    scales: Mapping[str, float] | None = None,
    place: Place | None = None,
) -> torch.optim.AdamW:
    """Build AdamW with two parameter groups: matrices decay, vectors (norms, biases, decay rates) do not. Each takes
    one fused kernel call a step; `scales` (multiples of the learning rate, by name) split them further. `place`: where
    Muon, if that is asked for, updates the matrices of the model in the scorer `module`. Collective with that."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("no parameter of the model is trainable: build the engine with trainable=False instead")
    multiples = scales or {}
    muon = config.optimizer == "muon" and place is not None
    matrices = {f"model.{name}" for name in muon_matrices(config, module.model)} if muon else set()
    updated = [
        Updated(p, p.ndim >= 2, multiples.get(name, 1.0), _held(name, p) if name in matrices else None)
        for name, p in trained.items()
    ]
    return optimizer_of(updated, config, place)


def _held(name: str, parameter: Tensor) -> Held:
    """Return what a parameter, whole or in FSDP2's shards, holds of matrices."""

    def boxes(tensor: Tensor) -> list[tuple[str, Box, Tensor]]:
        own = rows_held(name, tensor)
        return [] if own is None else [own]

    return Held(boxes, counts_once(parameter))


@dataclass(frozen=True, eq=False)
class Updated:
    """A tensor to update, whether it decays, and its multiple of the learning rate; what it holds of matrices, where
    Muon updates it."""

    parameter: Tensor
    decays: bool
    scale: float = 1.0
    held: Held | None = None


def optimizer_of(updated: Sequence[Updated], config: EngineConfig, place: Place | None = None) -> torch.optim.AdamW:
    """Make AdamW, or Muon beside it, over groups with one decay and one learning rate each; one rank of several may
    update nothing. `place`: of matrices. Collective under Muon."""
    scales = {1.0: None} | {one.scale: None for one in updated}
    groups: list[dict[str, Any]] = [
        {
            "params": [one.parameter for one in updated if _group_of(one) == (scale, decays, muon)],
            "weight_decay": config.weight_decay if decays else 0.0,
            "lr": config.lr * scale,
            LR_SCALE: scale,
            DECAYS: float(decays),
            **({MUON: 1.0, "momentum": config.muon_momentum} if muon else {}),
        }
        for scale in scales
        for decays, muon in ((True, False), (False, False), (True, True))
    ]
    groups = [group for group in groups if group["params"]] or groups
    options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    kind: type[torch.optim.AdamW] = torch.optim.AdamW
    if config.moments_dtype == "bfloat16":
        kind = BFloat16AdamW
    elif config.optimizer_on_host and config.backend == "fsdp2":  # Megatron's masters are on the host themselves
        kind = HostAdamW
    else:
        options["fused"] = True
    if config.optimizer == "adamw" or place is None:
        return kind(groups, **options)
    optimizer = with_matrices(kind)(groups, **options)
    optimizer.use({one.parameter: one.held for one in updated if one.held is not None}, place)
    return optimizer


def _group_of(one: Updated) -> tuple[float, bool, bool]:
    return one.scale, one.decays, one.held is not None


def name_of(optimizer: torch.optim.Optimizer | None) -> str:
    """Return an optimizer's name for logs: its package and its class."""
    if optimizer is None:
        return "none: the engine only scores"
    if isinstance(optimizer, MatrixUpdates):
        return str(optimizer)
    return f"{type(optimizer).__module__.partition('.')[0]}'s {type(optimizer).__name__}"


def gradient_norm(module: nn.Module, loss: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the global gradient norm, f64[]; NaN where a rank's loss is not finite.

    Every gradient is sharded over all ranks (FSDP2), or over those of each of several copies: the squares of its
    shards then add up to that many times the whole. `loss` is a scalar of this rank.
    """
    shards: dict[int, list[Tensor]] = {}
    for parameter in module.parameters():
        if parameter.grad is not None and (shard := _local(parameter.grad)).numel():
            shards.setdefault(_copies(parameter.grad), []).append(shard)
    squares = 0.0 * loss.detach().double()
    for copies, own in shards.items():
        squares = squares + torch.stack(list(_norms(own, loss.device))).double().square().sum() / copies
    return reduce_float64(squares, group).sqrt()


def _copies(tensor: Tensor) -> int:
    """Return how many ranks hold each element."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(axis) for axis, kept in enumerate(tensor.placements) if kept.is_replicate())


def _norms(shards: list[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Return the f32[] norm of each shard; shards on the host come to the device one at a time."""
    if all(shard.device == device for shard in shards):
        return foreach_norm(shards, dtype=torch.float32)
    return [foreach_norm([shard.to(device)], dtype=torch.float32)[0] for shard in shards]


def clip_and_step(module: nn.Module, optimizer: torch.optim.AdamW, norm: Tensor, adam: EngineConfig, lr: float) -> None:
    """Scale gradients down to `grad_clip` where `norm` is above it, and update; do neither where it is not finite.

    On a GPU both happen inside the fused update, so that the host does not wait for the norm.
    """
    set_adam(optimizer, lr, adam)
    limit = adam.grad_clip
    if norm.is_cuda:
        scale = torch.ones_like(norm) if limit is None else norm.clamp(min=limit) / limit
        optimizer.grad_scale, optimizer.found_inf = scale.float(), (~norm.isfinite()).float()  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]
        return
    known = float(norm)
    if math.isfinite(known):
        scale_gradients(module, known, limit)
        optimizer.step()


def set_adam(optimizer: torch.optim.Optimizer, lr: float, adam: EngineConfig) -> None:
    """Set every group's rate to its multiple of the scheduled learning rate, and Adam's settings."""
    for group in optimizer.param_groups:
        group["lr"], group["betas"], group["eps"] = lr * scale_of(group), adam.betas, adam.eps
        group["weight_decay"] = adam.weight_decay * group[DECAYS]


def scale_gradients(module: nn.Module, norm: float, limit: float | None) -> None:
    """Scale gradients down to `limit` where their norm is above it, and finite."""
    if limit is not None and limit < norm < math.inf:
        shards = [_local(p.grad) for p in module.parameters() if p.grad is not None]
        foreach_mul([shard for shard in shards if shard.numel()], limit / norm)


def finite_on_all_ranks(loss: Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether the losses of all ranks are finite; the host waits for them."""
    return not bool(reduce_float64((~loss.detach().isfinite()).double(), group))


finite_everywhere = finite_on_all_ranks  # its earlier name


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

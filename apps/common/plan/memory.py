"""Bytes of weights, gradients and optimizer states on the fullest rank. Activations and caches come on top."""

from collections.abc import Sequence
from dataclasses import dataclass

from apps.common.plan.grid import Grid
from apps.common.plan.model_shape import ModelShape, count_parameters

GIB = 2**30


@dataclass(frozen=True)
class Held:
    """Parameters that a rank of one pipeline stage holds, by how their optimizer states are sharded."""

    dense: float
    """Over the ranks that share data and context."""
    experts: float
    """Over the ranks that hold the same experts."""


def held_by_stage(shape: ModelShape, grid: Grid, layers: Sequence[int]) -> list[Held]:
    """Parameters on a rank of each stage: the first has the embedding, the last the head (one matrix where tied)."""
    count = count_parameters(shape)
    matrices = 1 if shape.tied_embeddings else 2
    matrix = count.embeddings / matrices / grid.tp
    held = []
    for stage, here in enumerate(layers):
        share = here / shape.layers
        ends = (stage == 0) + (stage == len(layers) - 1)
        ends = min(ends, matrices) if len(layers) == 1 else ends
        held.append(Held(share * count.dense / grid.tp + ends * matrix, share * count.experts / (grid.ep * grid.etp)))
    return held


def megatron_bytes(held: Held, grid: Grid, optimizer_on_host: bool) -> float:
    """Weights in bfloat16, gradients in float32, and float32 masters with two moments sharded over equal ranks."""
    states = 0.0 if optimizer_on_host else 12.0
    dense = held.dense * (6 + states / (grid.dp * grid.cp))
    return dense + held.experts * (6 + states / grid.edp)


def fsdp_bytes(shape: ModelShape, shards: int, master_bytes: int, optimizer_on_host: bool) -> float:
    """Masters, gradients and two moments, all shared by as many ranks as there are shards."""
    states = 0 if optimizer_on_host else 2 * master_bytes
    return count_parameters(shape).total * (2 * master_bytes + states) / shards

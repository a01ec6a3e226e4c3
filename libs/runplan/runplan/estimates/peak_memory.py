"""The peak memory of a training step on a rank, from sizes alone, by what is alive at its fullest moments.

1. `States`: weights, gradients and moments, which are there between steps too.
2. Activations: what a layer keeps for its backward pass (`activations`); under recomputation one row of hidden states a
   layer, and one layer's activations at a time. Gradients of the micro-batches before, where a step has several.
3. Moments of a step at which something else is there as well: the head's chunk of logits, a layer's gathered weights
   and gradients (FSDP2), the outermost weights' gradients before they are shared out (FSDP2), the update.

The peak is the largest of these moments, not their sum. Every figure counts elements that the code keeps; nothing is
fitted. Not counted: libraries' workspaces (cuBLAS: some 32 MiB a process), what torch's allocator cannot use, and
activations of a vision tower (its weights and their states are).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engines import EngineConfig
from runplan.estimates.activations import Kind, activation_bytes, fsdp_kind, kept_at_head
from runplan.estimates.logits import WIDE, fsdp_head, megatron_head
from runplan.estimates.mtp_head import mtp_bytes
from runplan.estimates.states import (
    StageParameters,
    States,
    fsdp_states,
    megatron_states,
    parameters_by_stage,
    width_of,
)
from runplan.layout.grid import Grid
from runplan.model.matrices import exchange_bytes
from runplan.model.model_shape import ModelShape, count_parameters, tower_parameters


@dataclass(frozen=True)
class Peak:
    """Bytes on a rank: what stays between steps, and at each full moment of a step."""

    states: float
    moments: dict[str, float]
    """Bytes of everything that is alive, states included, by the name of a moment."""

    @property
    def bytes(self) -> float:
        """Bytes of the fullest moment."""
        return max(self.moments.values())

    @property
    def when(self) -> str:
        """Name of the fullest moment."""
        return max(self.moments, key=lambda name: self.moments[name])


@dataclass(frozen=True)
class Tokens:
    """Tokens of one micro-batch on one rank: all of them, and those whose log-probs train."""

    all: int
    trained: int


def kept_bytes(shape: ModelShape, engine: EngineConfig, tokens: int, width: int) -> float:
    """Return the bytes of a micro-batch whose forward pass has run ahead (`router_forwards_ahead`)."""
    if not engine.gradient_checkpointing:
        return activation_bytes(shape, shape.layers, tokens, False, width, kind=fsdp_kind(shape, engine, width))
    return 0.0 if engine.activation_offload else float(width * tokens * shape.layers * shape.hidden)


def fsdp_peak(
    shape: ModelShape, engine: EngineConfig, shards: float, tokens: Tokens, width: int, several: bool = False
) -> Peak:
    """Return the peak of FSDP2 with sharded weights, of which a rank has one of `shards`.

    `width`: bytes of the dtype that layers compute in. `several`: whether a step has several micro-batches, whose
    gradients are added up.
    """
    count = count_parameters(shape)
    master = WIDE if engine.master_dtype == "float32" else 2
    largest = shape.vocab * shape.hidden * master / shards
    coming = (2 * engine.optimizer_on_host + 2 * engine.parameters_on_host) * largest
    coming += exchange_bytes(shape) if engine.optimizer == "muon" else 0.0
    parts = fsdp_states(shape, engine, shards)
    gradients = 0.0 if parts.all_on_host else parts.gradients
    states, added = parts.device - gradients, gradients if several else 0.0
    if parts.all_on_host:
        shards = math.inf  # none of the states stays on the device
    root = count.embeddings + shape.hidden
    gathered = width * root  # gathered from the first layer on, until the last gradient is there
    kind = fsdp_kind(shape, engine, width)
    activations = kept_at_head(shape, shape.layers, tokens.all, engine.gradient_checkpointing, width, kind=kind)
    logits = fsdp_head(shape, engine, tokens.trained, width).bytes + mtp_bytes(shape, engine, tokens.all, width)
    ahead = (engine.router_forwards_ahead or 0) * kept_bytes(shape, engine, tokens.all, width)
    passing = _Backward(shape, engine, math.inf if several else shards, tokens.all, width, master, kind)
    backward = max(passing.bytes(left) for left in (1, 2, shape.layers))
    return Peak(
        states,
        {
            "head": states
            + added
            + gathered
            + ahead
            + activations
            + logits
            + mtp_bytes(shape, engine, tokens.all, width),
            "layers": states + added + gathered + ahead + width * shape.vocab * shape.hidden + backward,
            "outermost": states + gradients + gathered + (width + WIDE) * root,
            # What is on the host comes to the device, a parameter's at a time, and Muon's matrices are put together.
            "update": states + gradients + coming,
        },
    )


@dataclass(frozen=True)
class _Backward:
    """A backward pass of FSDP2. `shards`: ranks that share the gradients of its layers; infinitely many where their
    memory is counted already."""

    shape: ModelShape
    engine: EngineConfig
    shards: float
    tokens: int
    width: int
    master: int
    kind: Kind

    def bytes(self, left: int) -> float:
        """Return the bytes while the gradients of layer `left` (from the first, 1) are made, and while they are
        reduced.

        Later layers have theirs. The layer before is gathered already, and the gradients of the layer after are still
        being reduced in float32.
        """
        count, shape = count_parameters(self.shape), self.shape
        layer = (count.dense + count.experts) / shape.layers
        gathered = self.width * layer * (min(left, 2) if self.engine.reshard_after_forward else shape.layers)
        there = self.master * layer * (shape.layers - left) / self.shards + gathered + self.width * layer
        making = self._activations(left) + WIDE * layer * (left < shape.layers)
        remain = self._activations(left) - self._activations(1)
        return there + max(making, remain + WIDE * layer * (1 + 1 / self.shards))

    def _activations(self, layers: int) -> float:
        recompute = self.engine.gradient_checkpointing
        return activation_bytes(self.shape, layers, self.tokens, recompute, self.width, kind=self.kind)


def peak_memory(shape: ModelShape, engine: EngineConfig, grid: Grid, layers: Sequence[int], shards: int) -> Peak:
    """Return the peak of a run whose steps have several micro-batches, which are full and every token of which trains.

    `layers`: of each pipeline stage. `shards`: ranks that share FSDP2's weights.
    """
    width = width_of(engine)
    tokens = Tokens(engine.max_tokens_per_rank, engine.max_tokens_per_rank)
    if engine.backend == "megatron":
        return megatron_peak(shape, engine, grid, layers, tokens, width)
    return fsdp_peak(shape, engine, shards, tokens, width, several=True)


def scoring_peak(shape: ModelShape, engine: EngineConfig, states: States, scored: float, tp: int = 1) -> float:
    """Return the bytes while a frozen model of `scored` bytes scores a full micro-batch beside these states.

    Nothing is kept for a backward pass: a layer's activations, a chunk's logits, and under FSDP2 the outermost weights
    and those of two layers, gathered.
    """
    tokens, width, count = engine.max_tokens_per_rank, width_of(engine), count_parameters(shape)
    passing = activation_bytes(shape, 1, tokens, True, width, tp)
    if engine.backend == "megatron":
        return states.device + scored + passing + megatron_head(shape, engine, tokens, width, tp).logits
    gathered = width * (count.embeddings + 2 * (count.dense + count.experts) / shape.layers)
    kept = 0.0 if states.all_on_host else states.device - states.gradients
    return kept + scored + gathered + passing + fsdp_head(shape, engine, tokens, width).logits


def megatron_peak(
    shape: ModelShape, engine: EngineConfig, grid: Grid, layers: Sequence[int], tokens: Tokens, width: int
) -> Peak:
    """Return the peak of the fullest stage.

    Every stage keeps as many micro-batches as stages come after it, and its own.
    """
    parameters = parameters_by_stage(shape, grid, layers, bool(engine.mtp_loss_scaling_factor))
    peaks = [
        _stage_peak(shape, engine, grid, layers, stage, parameters[stage], tokens, width)
        for stage in range(len(layers))
    ]
    return max(peaks, key=lambda peak: peak.bytes)


def _stage_peak(
    shape: ModelShape,
    engine: EngineConfig,
    grid: Grid,
    layers: Sequence[int],
    stage: int,
    parameters: StageParameters,
    tokens: Tokens,
    width: int,
) -> Peak:
    tower = tower_parameters(shape) if engine.vision != "off" and stage == 0 else 0
    states = megatron_states(engine, grid, parameters, width, tower).device
    flying = len(layers) - stage
    recompute = engine.gradient_checkpointing
    activations = activation_bytes(shape, layers[stage], tokens.all, recompute, width, grid.tp)
    others = activation_bytes(shape, layers[stage], tokens.all, False, width, grid.tp)
    if recompute:
        others = width * tokens.all * layers[stage] * shape.hidden / grid.tp
    activations += (flying - 1) * others
    last = stage == len(layers) - 1
    head = megatron_head(shape, engine, tokens.trained, width, grid.tp).bytes if last else 0.0
    head += mtp_bytes(shape, engine, tokens.all, width, grid.tp, stage > 0) if last else 0.0
    layer = (parameters.dense + parameters.experts) / max(1, layers[stage])
    update = states + (exchange_bytes(shape) if engine.optimizer == "muon" else 0.0)
    return Peak(
        states,
        {
            "head": states + activations + head,
            "layers": states + activations + width * layer,
            "update": update,
        },
    )

"""Seconds that a step's training computes, from seqpack's count of operations; nothing else of a step is estimated.

Seconds = operations / (ranks x rate of a device), and a pipeline waits besides. The rate is measured (`rates`). Shares
were chosen on one row each, and compared with others: dense and compiled +4 % at 32,768 tokens, +6 % with layers
recomputed, -8 % on two GPUs. Machines on a network were not measured: there it is a lower bound at best.
"""

from dataclasses import dataclass

from runplan.layout.batches import bubble_share
from runplan.model.model_shape import ModelShape
from seqpack.planning.flops import LayerFlops, ModelFlops, delta_net, experts, full_attention, mlp


@dataclass(frozen=True)
class StepWork:
    """Work of a step: `sequences` of `length` tokens, trained `epochs` times on `ranks` ranks.

    `forwards`: further forward passes (log-probs before the first update, a reference model). `counting`: passes
    without the head that a router's loss takes its counts from. `stages` wait for one another with so many
    `micro_batches`.
    """

    sequences: int
    length: int
    ranks: int
    epochs: int = 1
    forwards: int = 0
    recompute: bool = False
    stages: int = 1
    chunks: int = 1
    micro_batches: int = 1
    counting: float = 0.0


def flops_of(shape: ModelShape) -> ModelFlops:
    """Count the operations of the layers, as seqpack does."""
    if shape.experts:
        wide = experts(
            shape.hidden,
            shape.expert_intermediate,
            shape.experts,
            shape.experts_per_token,
            shape.shared_expert_intermediate,
            shared_gate=True,
        )
    else:
        wide = mlp(shape.hidden, shape.intermediate)
    attends = full_attention(
        shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, wide, gated=shape.gated_attention
    )
    layers: tuple[LayerFlops, ...] = (attends,) * shape.full_attention_layers
    if shape.linear_layers:
        heads, dim = (shape.linear_key_heads, shape.linear_value_heads), shape.linear_head_dim
        layers += (delta_net(shape.hidden, *heads, dim, dim, shape.linear_conv_width, wide),) * shape.linear_layers
    return ModelFlops(layers, head=2.0 * shape.hidden * shape.vocab)


def training_flops(shape: ModelShape, work: StepWork) -> float:
    """Count a step's operations over all ranks: forward and twice that backward, recomputed layers again."""
    model = flops_of(shape)
    from seqpack.planning.costs import SequenceCost  # imports numpy

    whole, layers = SequenceCost.of(model)(work.length), SequenceCost.of(model, lm_head=False)(work.length)
    each = 3 * whole + (layers if work.recompute else 0.0)
    return work.sequences * (work.epochs * each + work.forwards * whole + work.counting * layers)


def training_seconds(shape: ModelShape, work: StepWork, reached: float) -> float:
    """Return the seconds of a step; `reached`: operations a second of each rank while it waits for no other stage."""
    waits = bubble_share(work.micro_batches, work.stages, work.chunks)
    return training_flops(shape, work) / (work.ranks * reached) / (1 - waits)

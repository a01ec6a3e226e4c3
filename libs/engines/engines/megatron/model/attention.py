"""Core attention for megatron-core's layers: rotary embedding and packed attention, on one rank or over a group."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from seqpack.adapters.context import PackedContext


@dataclass
class PackedTokens(PackedSeqParams):
    """The data that goes through megatron-core's layers beside the hidden states, in place of its `PackedSeqParams`.

    `context` says where sequences begin and who mixes tokens (this rank alone, or a context-parallel group); `cos`,
    `sin` [T, R] rotate the first R of a head's dimensions. Of the t tokens that this rank has between layers, `counted`
    bool[t] are those that the router's loss counts, None where it is not asked for; `experts` i16[t, layers, k] those
    to take, -1 where the router chooses, None where it always chooses.
    """

    context: PackedContext | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    counted: Tensor | None = None
    experts: Tensor | None = None


class PackedCoreAttention(nn.Module):
    """In place of megatron-core's DotProductAttention: q [T, heads, D], k and v [T, groups, D] -> [T, heads * D]."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None = None,
        packed_seq_params: PackedTokens | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """Attend in each sequence."""
        del attention_mask  # causal inside each sequence
        assert packed_seq_params is not None
        context = packed_seq_params.context
        assert context is not None
        cos, sin = packed_seq_params.cos, packed_seq_params.sin
        assert cos is not None
        assert sin is not None
        q, k = (self.rotate(x, cos, sin).to(value.dtype) for x in (query, key))
        return context.ops.attention(q, k, value, context, self.scale, None).flatten(1)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [T, heads, D] by the angles of cos and sin [T, R]."""
        return rotate(x, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of dimensions (i, i + R / 2) of x [T, heads, D] by the angles of cos and sin [T, R], R <= D."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos.unsqueeze(1) + torch.cat([-high, low], dim=-1) * sin.unsqueeze(1)
    return torch.cat([turned, rest], dim=-1)

"""Rotary embeddings that depend on the longest sequence of a call (`longrope`), for each sequence of a packed row."""

from typing import Any

import torch
from torch import Tensor, nn

from seqpack.adapters.boundaries import restarts

BY_LENGTH = "longrope"
"""The type whose angles are of two tables: a call with more than `original_max_position_embeddings` positions takes
the long one for all of them."""


class PackedRotary(nn.Module):
    """The class of an adapted rotary embedding, before its stock class: in a row each sequence has its own table.

    Sequences are where positions begin again. Rows that are padded (several in a call) are the stock module's.
    """

    rope_type: Any
    config: Any

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [1, T, D]: the stock ones of short sequences, and of long ones, by token."""
        kind, values, given = self.rope_type, self.config.rope_parameters, {}
        if layer_type is not None:
            kind, values, given = kind[layer_type], values[layer_type], {"layer_type": layer_type}
        if kind != BY_LENGTH or position_ids.shape[0] != 1:
            stock: tuple[Tensor, Tensor] = super().forward(x, position_ids, **given)
            return stock
        threshold = values["original_max_position_embeddings"]
        number = nn.functional.pad(restarts(position_ids)[0].cumsum(0), (1, 0))
        longest = position_ids.new_zeros(number.shape).scatter_reduce(0, number, position_ids[0], "amax")
        long = (longest >= threshold)[number][None]
        short_ones = super().forward(x, position_ids.masked_fill(long, 0), **given)
        long_ones = super().forward(x, position_ids.masked_fill(~long, threshold), **given)
        cos, sin = (torch.where(long[..., None], b, a) for a, b in zip(short_ones, long_ones, strict=True))
        return cos, sin


def by_length(model: nn.Module) -> list[nn.Module]:
    """Return the rotary embeddings of a model whose angles depend on the longest sequence of a call."""
    kinds = {module: getattr(module, "rope_type", None) for module in model.modules()}
    return [one for one, kind in kinds.items() if BY_LENGTH in (kind.values() if isinstance(kind, dict) else [kind])]

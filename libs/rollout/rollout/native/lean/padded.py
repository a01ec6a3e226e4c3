"""Causal attention of packed prompts on a CPU: padded to a few lengths, by indices that all layers share."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from seqpack.ops.varlen_attention import buckets


class Padded:
    """Indices that pad packed prompts of like lengths to their longest."""

    def __init__(self, lengths: Sequence[int]) -> None:
        starts = [0, *accumulate(lengths)]
        self._groups: list[tuple[Tensor, int, int]] = []  # tokens to take, prompts, their longest
        back, before = torch.empty(starts[-1], dtype=torch.int64), 0
        for group in buckets(lengths):
            longest = lengths[group[0]]
            place = torch.arange(longest)
            begins, sizes = (torch.tensor([values[i] for i in group])[:, None] for values in (starts, lengths))
            taken = begins + place.minimum(sizes - 1)  # padding repeats the last token; no token attends to it
            real = place < sizes
            back[taken[real]] = torch.arange(before, before + taken.numel()).view_as(taken)[real]
            before += taken.numel()
            self._groups.append((taken.flatten(), len(group), longest))
        self._back = back

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return causal attention within each prompt: q [T, Hq, D], k and v [T, Hkv, D] to [T, Hq, D]."""
        outputs: list[Tensor] = []
        for taken, count, longest in self._groups:
            queries, keys, values = (
                x.index_select(0, taken).unflatten(0, (count, longest)).transpose(1, 2) for x in (q, k, v)
            )
            o = scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(o.transpose(1, 2).flatten(0, 1))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).index_select(0, self._back)

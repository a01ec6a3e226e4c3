"""Prompts that continue cached rows: one packed pass over the new tokens alone."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from rollout.native.decoders.decoder import Past
from rollout.native.lean.prefill import PackedCache
from seqpack.ops import causal_conv1d, causal_conv1d_state, gated_delta_rule
from seqpack.ops.varlen_attention import buckets


class Continued:
    """The `Mixers` of m rows of T new tokens together, each after its past; `cache` holds the state after both."""

    def __init__(self, new_tokens: Sequence[int], pasts: Sequence[Past[PackedCache]], device: torch.device) -> None:
        starts = {id(cache): [0, *accumulate(cache.lengths)] for cache, _ in pasts}
        self._new_tokens = list(new_tokens)
        self._pasts = [(cache, pick, starts[id(cache)][pick], cache.lengths[pick]) for cache, pick in pasts]
        self._cu_new = torch.tensor([0, *accumulate(new_tokens)], dtype=torch.int32, device=device)
        self.cache = PackedCache.of(
            [p[3] + n for p, n in zip(self._pasts, new_tokens, strict=True)],
            device,
            [cache.ahead[pick] for cache, pick in pasts],
        )
        self._groups = buckets(self.cache.lengths)
        self._masks = [self._mask(group, device) for group in self._groups]

    def convolve(self, index: int, x: Tensor, weight: Tensor) -> Tensor:
        """Convolve each row's new tokens after the cached inputs of its past."""
        assert index == len(self.cache.conv)
        past = torch.stack([cache.conv[index][pick] for cache, pick, _, _ in self._pasts])
        self.cache.conv.append(causal_conv1d_state(x, self._cu_new, weight.shape[1], past))
        return causal_conv1d(x, weight, None, self._cu_new, "silu", past)

    def recur(self, index: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Run the recurrence of each row from its cached state."""
        assert index == len(self.cache.state)
        past = torch.stack([cache.state[index][pick] for cache, pick, _, _ in self._pasts])
        o, final = gated_delta_rule(q, k, v, g, beta, self._cu_new, initial_state=past, output_final_state=True)
        assert final is not None
        self.cache.state.append(final)
        return o

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Compute the attention of each row's new tokens to its past and to themselves."""
        assert index == len(self.cache.kv)
        rows: list[Tensor] = []
        for (cache, _, start, length), new in zip(
            self._pasts, torch.stack([k, v], dim=1).split(self._new_tokens), strict=True
        ):
            rows.append(torch.cat([cache.kv[index][start : start + length], new]))
        self.cache.kv.append(torch.cat(rows))
        queries, outputs = q.split(self._new_tokens), [q] * len(rows)
        for group, mask in zip(self._groups, self._masks, strict=True):
            kv = pad_sequence([rows[i] for i in group], batch_first=True).transpose(1, 3)  # [b, Hkv, 2, n, D]
            padded = pad_sequence([queries[i] for i in group], batch_first=True).transpose(1, 2)  # [b, Hq, s, D]
            keys, values = kv.unbind(2)
            o = scaled_dot_product_attention(padded, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
            for i, row in zip(group, o.transpose(1, 2), strict=True):
                outputs[i] = row[: self._new_tokens[i]]
        return torch.cat(outputs)

    def _mask(self, group: Sequence[int], device: torch.device) -> Tensor:
        """Return the columns that the new tokens of a group's rows see, bool [b, 1, s, n]: all up to their own."""
        past = torch.tensor([self._pasts[i][3] for i in group], device=device)
        new_tokens, total = max(self._new_tokens[i] for i in group), max(self.cache.lengths[i] for i in group)
        own = past[:, None] + torch.arange(new_tokens, device=device)
        return torch.arange(total, device=device) <= own[:, None, :, None]

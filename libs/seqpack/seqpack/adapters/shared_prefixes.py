"""Packed sequences that share prefixes, each prefix once: a group's answers to one prompt.

The tokens of a call are those of P prefixes, then of m suffixes, each of which continues a prefix. All that is token by
token is then done once for a prefix. A convolution and a recurrence begin a suffix from the state that its prefix left,
whose gradient is the sum over its suffixes. Attention and other operations are those of the whole rows: their inputs
are repeated, and of the outputs each token's first is taken. With P + m segments in the context's `cu_seqlens`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqpack.adapters.context import Activation, LocalOps, PackedContext
from seqpack.ops import causal_conv1d, causal_conv1d_state, gated_delta_rule


@dataclass(frozen=True)
class SharedPrefixOps:
    """The `PackedOps` of such a call.

    `rows`: the boundaries of whole rows, T tokens together. `tokens` i64[T]: which token of the call each of them is;
    `first` i64[N]: the first of them that each token of the call is. `parents` i64[m]: the prefix of each suffix.
    """

    rows: PackedContext
    tokens: Tensor
    first: Tensor
    parents: Tensor
    whole: LocalOps = LocalOps()  # noqa: RUF009 (frozen)

    def causal_conv1d(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, context: PackedContext, activation: Activation
    ) -> Tensor:
        """Return the convolution; a suffix sees the last inputs of its prefix."""
        (before, after), (prefixes, suffixes) = self._split(x, context), self._bounds(context)
        state = causal_conv1d_state(before, prefixes, weight.shape[1]).index_select(0, self.parents)
        return torch.cat(
            [
                causal_conv1d(before, weight, bias, prefixes, activation),
                causal_conv1d(after, weight, bias, suffixes, activation, state),
            ]
        )

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, context: PackedContext
    ) -> Tensor:
        """Return the recurrence; a suffix begins from the state after its prefix."""
        (q, q_after), (k, k_after), (v, v_after), (g, g_after), (beta, beta_after) = (
            self._split(x, context) for x in (q, k, v, g, beta)
        )
        prefixes, suffixes = self._bounds(context)
        o, state = gated_delta_rule(q, k, v, g, beta, prefixes, output_final_state=True)
        assert state is not None
        begun = state.index_select(0, self.parents)
        after = gated_delta_rule(q_after, k_after, v_after, g_after, beta_after, suffixes, initial_state=begun)[0]
        return torch.cat([o, after])

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: PackedContext,
        scale: float,
        window: int | None,
        **options: Any,
    ) -> Tensor:
        """Return causal attention of whole rows."""
        del context
        q, k, v = (x.index_select(0, self.tokens) for x in (q, k, v))
        return self.whole.attention(q, k, v, self.rows, scale, window, **options).index_select(0, self.first)

    def by_rows(self, function: Callable[[Tensor], Tensor], x: Tensor, context: PackedContext) -> Tensor:
        """Apply a causal function of rows to whole rows."""
        del context
        return self.whole.by_rows(function, x.index_select(0, self.tokens), self.rows).index_select(0, self.first)

    def _bounds(self, context: PackedContext) -> tuple[Tensor, Tensor]:
        """Return the boundaries of prefixes, and those of suffixes from 0 on."""
        count = len(context.cu_seqlens) - 1 - len(self.parents)
        suffixes = context.cu_seqlens[count:]
        return context.cu_seqlens[: count + 1], suffixes - suffixes[0]

    def _split(self, x: Tensor, context: PackedContext) -> tuple[Tensor, Tensor]:
        """Return the tokens of prefixes and those of suffixes."""
        end = int(context.cu_seqlens[len(context.cu_seqlens) - 1 - len(self.parents)])
        return x[:end], x[end:]

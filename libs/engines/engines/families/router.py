"""The losses of a router with experts, exact over any micro-batches and ranks: load balancing, and size of its logits.

Switch Transformer (Fedus et al. 2021, equations 4 to 6) as transformers computes it on one batch, pooled over layers:

    loss = coefficient * E * sum_e (C_e / R) * (P_e / R)

over E experts, with R = layers x tokens of the whole global batch (padding excluded, prompts included), C_e the number
of those rows that chose expert e (no gradient), P_e the sum of their probabilities of e. C, P and R are sums over
tokens, but the loss is a product of two sums. It is split over micro-batches by first counting C and R over all of them
(`engines.scoring.router_counts`: a pass without gradients where nothing else says them), after which micro-batch m adds
coefficient * E * sum_e (C_e / R) * (P_e^m / R).

The z-loss (ST-MoE, Zoph et al. 2022, equation 5) holds logits x down. As in megatron-core, whose `moe_z_loss_coeff` has
the same meaning, layers are added up and not averaged, so with T = tokens of the whole global batch:

    loss = z_coefficient * sum_layers (1 / T) sum_tokens (log sum_e exp x_e)^2
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """Sums over the tokens and routed layers of some micro-batches; they add up over micro-batches and ranks."""

    terms: Tensor
    """Sums f32[E + 1] of each expert's probability, and of the logits' squared log-partition; differentiable."""
    chosen: Tensor
    """Counts f32[E] of each expert among the top k."""
    rows: Tensor
    """Number f32[] of tokens x layers."""


class RouterCounts(NamedTuple):
    """`chosen` f32[E] and `rows` f32[] summed over the whole global batch, without gradients.

    `terms` are the sums of `Routing`, where what counts has them too.
    """

    chosen: Tensor
    rows: Tensor
    terms: Tensor | None = None


@dataclass(frozen=True)
class RouterLoss:
    """See the module's text. `coefficient` is the config's `router_aux_loss_coef`, `layers` counts the routed ones."""

    coefficient: float
    experts: int
    top_k: int
    layers: int
    z_coefficient: float = 0.0

    def routing(
        self, router_logits: Sequence[Tensor], counted: Tensor, taken: Sequence[Tensor] | None = None
    ) -> Routing:
        """Sum over one micro-batch: router_logits [T, E] a routed layer; `counted` bool[T] leaves padding out.

        `taken` i64[T, k] a layer: the experts that tokens went to, where others than the router's own choice.
        """
        weight = counted.reshape(-1).to(torch.promote_types(router_logits[0].dtype, torch.float32))
        terms = weight.new_zeros(self.experts + 1)
        chosen = weight.new_zeros(self.experts)
        for number, logits in enumerate(router_logits):
            logits = logits.to(weight.dtype)
            layer = torch.softmax(logits, dim=-1)
            values = torch.cat([layer, logits.logsumexp(-1, keepdim=True).square()], dim=-1)
            terms = terms + (values * weight.unsqueeze(-1)).sum(0)
            top = layer.detach().topk(self.top_k, dim=-1).indices if taken is None else taken[number]
            chosen = chosen.index_add(0, top.reshape(-1), weight.repeat_interleave(self.top_k))
        return Routing(terms, chosen, len(router_logits) * weight.sum())

    def loss(self, terms: Tensor, counts: RouterCounts) -> Tensor:
        """Return this micro-batch's share, from its `Routing.terms` and the counts of the whole global batch."""
        balance = (counts.chosen / counts.rows * terms[:-1] / counts.rows).sum()
        return self.coefficient * self.experts * balance + self.z_coefficient * self.layers * terms[-1] / counts.rows

"""Expert parallelism: tokens go to the ranks that hold their experts, and the results come back.

Of E experts rank r of n holds those from r E / n to (r + 1) E / n. A call of a layer's experts, in order:

1. The (token, expert) pairs are sorted by expert, and so by the rank that they go to.
2. The ranks tell each other how many pairs of each expert come, then send the tokens (all-to-all, uneven).
3. A rank computes its experts on what has come, by the model's own code: experts are numbered from 0 there.
4. The results go back, are put in their old order, weighted by the router, and added up for each token.

The backward pass sends gradients the same ways back. What is computed for a pair does not depend on the ranks, nor does
the order of the sum, so the result is that of one rank up to the kernels' blocking. All ranks of the group call it as
often as each other, with any number of tokens. The host waits for the numbers of step 2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engines.experts.grouped_experts import Run, routed_experts

WEIGHTS = ("gate_up_proj", "down_proj")
"""Weights of a module of experts: [E, 2 I, H] and [E, H, I]."""


class Routes(NamedTuple):
    """The routes of a rank's S (token, expert) pairs to other ranks, and of the R pairs that come in.

    `order` i64[S]: which pair is sent at each place; `sent` and `received`: numbers of pairs to and from each rank;
    `experts` i64[R]: the expert of each pair that comes in, counted from 0 among this rank's.
    """

    order: Tensor
    sent: list[int]
    received: list[int]
    experts: Tensor


def routes(experts: Tensor, num_experts: int, group: dist.ProcessGroup) -> Routes:
    """Exchange the routes of `experts` i64[T, k]. Collective."""
    size = dist.get_world_size(group)
    flat = experts.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    going = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    coming = torch.empty_like(going)
    dist.all_to_all_single(coming, going, group=group)
    sent, received = torch.stack([going, coming]).view(2, size, -1).sum(-1).tolist()
    own = torch.arange(num_experts // size, device=flat.device).repeat(size)
    return Routes(order, sent, received, own.repeat_interleave(coming, output_size=sum(received)))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.way = (sent, received, group)
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.way
        return _exchanged(grads[0], received, sent, group), None, None, None


def _exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    came = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(came, rows.contiguous(), list(received), list(sent), group=group)
    return came


@dataclass(frozen=True)
class ExpertExchange:
    """The forward of a module of experts whose first dimension is sharded over `group`; called as the stock one.

    `stock`: the class's own forward (grouped matrix products, or another that the model's config names).
    """

    module: nn.Module
    stock: Callable[..., Tensor]
    num_experts: int
    group: dist.ProcessGroup

    def __call__(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, run: Run | None = None
    ) -> Tensor:
        """Return [T, H] of hidden states [T, H], experts i64[T, k] and their weights [T, k]. Collective.

        `run`: see `engines.experts.grouped_experts.routed_experts`, which computes then in place of `stock`.
        """
        way = routes(top_k_index, self.num_experts, self.group)
        each = top_k_index.shape[-1]
        came: Any = _Exchange.apply(hidden_states[way.order // each], way.sent, way.received, self.group)
        back: Any = _Exchange.apply(self._compute(came, way.experts, run), way.received, way.sent, self.group)
        place = torch.empty_like(way.order)
        place[way.order] = torch.arange(len(place), device=place.device)
        weighted = back[place] * top_k_weights.reshape(-1, 1)
        result: Tensor = weighted.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)
        return result

    def _compute(self, rows: Tensor, experts: Tensor, run: Run | None) -> Tensor:
        own = _OwnExperts(self.module, self.num_experts // dist.get_world_size(self.group))
        if not len(rows):  # nothing came: weights must get a gradient all the same, FSDP's collectives match then
            return rows + 0.0 * (own.gate_up_proj.sum() + own.down_proj.sum())
        ones = rows.new_ones(len(rows), 1)
        if run is not None:
            return routed_experts(rows, experts[:, None], ones, own.gate_up_proj, own.down_proj, run)
        return self.stock(own, rows, experts[:, None], ones)


class _OwnExperts:
    """A view of a module of experts for its stock forward: the experts of this rank alone."""

    def __init__(self, module: nn.Module, num_experts: int) -> None:
        self._module, self.num_experts = module, num_experts
        self.gate_up_proj, self.down_proj = (_local(getattr(module, name)) for name in WEIGHTS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _local(weight: Any) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight

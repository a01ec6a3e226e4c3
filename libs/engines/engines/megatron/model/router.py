"""The router of megatron-core's experts, with our losses in place of megatron-core's.

megatron-core balances each layer and micro-batch by itself, counts padding, and divides the gradient by the
tensor-parallel ranks where losses are summed; its z-loss (`moe_z_loss_coeff`) does the same. Ours are those of
`engines.families.router`, over the tokens of the whole global batch. What they divide by is counted first, over all
stages and ranks: in forward passes whose backward pass comes later, and in a pass without gradients. In the backward
pass every router adds the gradient of its own share, which no other rank has, so that they add up to the whole.

Routers can be given the experts that tokens go to (`engines.experts.routers` says why). megatron-core asks an object of
its own for them, one list for all engines of a process; ours replaces it, and reads what came with the tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from engines.config import EngineConfig
from engines.experts.float32_logits import float32_logits
from engines.families.registry import family_of
from engines.families.router import RouterCounts, RouterLoss
from engines.megatron.model.attention import PackedTokens
from engines.scoring.router_counts import check_forwards_ahead


class Balance:
    """The counts of a rank's routers over a step, and the loss whose gradient they add."""

    def __init__(self, loss: RouterLoss, device: torch.device, dtype: torch.dtype) -> None:
        """Take the loss. `dtype`: what routers compute in; sums are float32 at least."""
        self.loss = loss
        self.device = device
        self.counts: RouterCounts | None = None
        self.total = 0.0
        self._sums = torch.zeros(0, dtype=torch.promote_types(dtype, torch.float32), device=device)

    def begin(self) -> None:
        """Reset the counts, and count from now on."""
        self.counts = None
        self._sums = self._sums.new_zeros(2 * self.loss.experts + 2)

    def counted_all(self, world: dist.ProcessGroup) -> RouterCounts:
        """Sum the counts over all ranks, which backward passes need; return them. Collective."""
        dist.all_reduce(self._sums, group=world)
        chosen, terms, rows = self._sums.split([self.loss.experts, self.loss.experts + 1, 1])
        return self.take(RouterCounts(chosen, rows.squeeze(0), terms))

    def take(self, counts: RouterCounts) -> RouterCounts:
        """Take the counts of a step, and the loss that they make; return them."""
        assert counts.terms is not None, "routers sum all three"
        self.counts = counts
        self.total = float(self.loss.loss(counts.terms, counts))
        return counts

    def see(self, logits: Tensor, counted: Tensor, given: Tensor | None) -> Tensor:
        """Count a layer's logits [..., experts] until all are counted; return them with its share of the loss.

        `counted` bool[t]: the tokens that count; `given` i64[t, k]: their experts, -1 where the router chooses.
        """
        flat = logits.flatten(0, -2)
        taken = None
        if given is not None:
            taken = [_merged(given, flat.detach().topk(self.loss.top_k, dim=-1).indices)]
        if self.counts is None:
            sums = self.loss.routing([flat.detach()], counted, taken)
            self._sums += torch.cat([sums.chosen, sums.terms, sums.rows[None]])
        with_loss: Tensor = _WithLoss.apply(logits, self, counted)
        return with_loss

    def share(self, logits: Tensor, counted: Tensor) -> Tensor:
        """Return the share of the loss that a layer's logits have."""
        assert self.counts is not None, "all are counted before the first backward pass"
        return self.loss.loss(self.loss.routing([logits.flatten(0, -2)], counted).terms, self.counts)


def balance_of(config: EngineConfig, model_config: Any, device: torch.device, dtype: torch.dtype) -> Balance | None:
    """Return the counts and losses of a model's routers, which compute in `dtype`; None where they have no loss."""
    coefficients = config.router_aux_loss_coef, config.router_z_loss_coef
    router = family_of(model_config).auxiliary_loss(model_config, *coefficients)
    check_forwards_ahead(config.router_forwards_ahead or 0, router)
    return None if router is None else Balance(router, device, dtype)


class Router(TopKRouter):
    """Logits in float32: megatron-core's own product needs Transformer Engine for that."""

    balance: Balance | None = None
    layer = 0
    """Number of the router among the routed layers of the model."""
    tokens: PackedTokens | None = None
    """Tokens that its layer computes."""
    taken: Tensor | None = None
    """The experts i64[t, k] that its last tokens went to."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.router_replay = _ReplayedExperts(self)

    @contextmanager
    def computing(self, tokens: PackedTokens) -> Iterator[None]:
        """Set the tokens that the layer computes inside the block."""
        self.tokens = tokens
        try:
            yield
        finally:
            self.tokens = None

    @property
    def given(self) -> Tensor | None:
        """The experts i64[t, k] that its tokens are to go to, -1 where it chooses; None: it always chooses."""
        assert self.tokens is not None, "a router is called by its layer"
        experts = self.tokens.experts
        return None if experts is None else experts[:, self.layer].to(torch.int64)

    def gating(self, input: Tensor) -> Tensor:  # noqa: A002 (megatron-core's name)
        """Return the logits [..., experts] of hidden states [..., H]."""
        logits = float32_logits(input, self.weight)
        if self.balance is None or self.tokens is None or self.tokens.counted is None:
            return logits
        return self.balance.see(logits, self.tokens.counted, self.given)


class _ReplayedExperts:
    """The replacement of megatron-core's `RouterReplay`, which its routing asks for the experts of tokens."""

    def __init__(self, router: Router) -> None:
        self.router = router

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (scores of the experts taken [t, k], these experts i64[t, k]) of scores [t, E].

        The gradient of the mixing weights goes to the experts that were taken.
        """
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        replayed = self.router.given
        if replayed is None:
            self.router.taken = own
            return values, own
        self.router.taken = taken = _merged(replayed, own)
        return scores.gather(1, taken), taken


def _merged(given: Tensor, own: Tensor) -> Tensor:
    return torch.where(given >= 0, given, own)


class _WithLoss(torch.autograd.Function):
    """The identity of logits; its backward pass adds the gradient of their share of the loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, balance: Balance, counted: Tensor) -> Tensor:
        ctx.balance = balance
        ctx.save_for_backward(logits, counted)
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, counted = ctx.saved_tensors
        with torch.enable_grad():
            own = logits.detach().requires_grad_()
            (more,) = torch.autograd.grad(ctx.balance.share(own, counted), own)
        return grads[0] + more, None, None

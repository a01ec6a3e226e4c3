"""What a router's loss needs of a whole step before the first backward pass, with as few forward passes as can be.

The loss is a sum over experts of count times probability (`engines.families.router`): counts are of the global batch,
and the gradient of a micro-batch needs those of all others. No backward pass makes up for counts that come later, so:

1. Without a balancing loss (the z-loss alone) tokens are counted, and with the experts of all tokens given (routing
   replay) these too: no pass. Nor is there one where the same weights have just scored the same batch
   (`TrainEngine.forward`), which counted.
2. Else the forward passes of the first micro-batches come before any backward pass and give their counts: of one, and
   of `router_forwards_ahead` more, whose activations stay meanwhile (`runplan` says how many fit).
3. A pass without gradients, and without the head, runs over those that are left. A rank with no more micro-batches than
   run ahead needs none.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engines.families.router import RouterCounts, RouterLoss
from engines.inputs.model_inputs import ModelInputs
from engines.media.media_batch import select_media
from seqpack.batches.schema import ROUTED_EXPERTS
from seqpack.batches.view import BatchView

_READ = ("input_ids", "position_ids", ROUTED_EXPERTS)
"""What the choices of a router depend on, of a batch without media."""


@dataclass(frozen=True)
class ScoredCounts:
    """The counts of a whole batch that was scored, for an update of the same batch by the same weights."""

    counts: RouterCounts
    lengths: tuple[int, ...]
    values: dict[str, Tensor]
    """Copies of what the choices depend on: the caller may write into the batch."""

    @classmethod
    def of(cls, view: BatchView, counts: RouterCounts) -> "ScoredCounts | None":
        """Return the counts of a batch; None of one with media, whose copies would be large."""
        if select_media(view, ()):
            return None
        return cls(counts, view.lengths, {key: view.flat(key).clone() for key in _READ if key in view})

    def counts_of(self, view: BatchView) -> RouterCounts | None:
        """Return the counts where a batch is the one that was scored."""
        if view.lengths != self.lengths or select_media(view, ()):
            return None
        if [key for key in _READ if key in view] != [*self.values]:
            return None
        same = all(torch.equal(view.flat(key), value) for key, value in self.values.items())
        return self.counts if same else None


def agreed(sums: Tensor, group: dist.ProcessGroup | None) -> RouterCounts:
    """Return the counts of a step from the sums f32[E + 1] of each rank: choices of each expert, and rows."""
    dist.all_reduce(sums, group=group)
    return RouterCounts(sums[:-1], sums[-1])


def check_forwards_ahead(ahead: int, router: RouterLoss | None) -> None:
    """Raise ValueError for forward passes that would run ahead for nothing."""
    if ahead and (router is None or not router.coefficient):
        raise ValueError(
            "router_forwards_ahead spares the pass that a router's balancing loss needs, and this model trains without "
            "one: set router_aux_loss_coef, or leave it at 0"
        )


def can_be_given(router: RouterLoss, replay: bool) -> bool:
    """Return whether inputs may say the counts without a forward pass."""
    return replay or not router.coefficient


def given_counts(router: RouterLoss, inputs: ModelInputs, dtype: torch.dtype) -> Tensor:
    """Return f[E + 2]: the choices of each expert in a micro-batch and its rows, as far as its inputs say, and how many
    choices they do not say."""
    counted = inputs.counted.reshape(-1)
    chosen, unknown = counted.new_zeros(router.experts, dtype=dtype), counted.new_zeros((), dtype=dtype)
    if router.coefficient:
        assert inputs.experts is not None, "routing is replayed"
        experts = inputs.experts[counted].flatten().to(torch.int64)
        known = experts[experts >= 0]
        chosen = torch.bincount(known, minlength=router.experts).to(dtype)
        unknown += experts.numel() - known.numel()
    rows = router.layers * counted.sum().to(dtype)
    return torch.cat([chosen, rows[None], unknown[None]])

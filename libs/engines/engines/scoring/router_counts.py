"""What a router's loss needs of a whole step before the first backward pass, with as few forward passes as can be.

The loss is a sum over experts of count times probability (`engines.families.router`): counts are of the global batch,
and the gradient of a micro-batch needs those of all others. No backward pass makes up for counts that come later, so:

1. Without a balancing loss (the z-loss alone) tokens are counted, and with the experts of all tokens given (routing
   replay) these too: no pass.
2. Else a pass without gradients, and without the head, runs over all micro-batches but the first, whose own forward
   pass gives its counts. One micro-batch a rank needs no pass.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engines.families.router import RouterCounts, RouterLoss
from engines.inputs.model_inputs import ModelInputs


@dataclass
class StepCounts:
    """The counts of a step: `known`, or `later` f32[E + 1] of all micro-batches of this rank but the first."""

    group: dist.ProcessGroup | None
    later: Tensor | None = None
    known: RouterCounts | None = None

    def of(self, first: Callable[[], Tensor]) -> RouterCounts:
        """Return the counts; at first `first()` f32[E + 1] is added, and all is summed over ranks. Collective."""
        if self.known is None:
            sums = first() if self.later is None else first() + self.later
            dist.all_reduce(sums, group=self.group)
            self.known = RouterCounts(sums[:-1], sums[-1])
        return self.known


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

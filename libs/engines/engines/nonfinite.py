"""Guards against numbers that are not finite: a run ends with an error that says where they are."""

import logging
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from engines.config import EngineConfig
from engines.step_errors import FailedStepError as FailedStepError
from engines.step_errors import LogProbDifferenceError as LogProbDifferenceError
from engines.step_errors import NonFiniteError as NonFiniteError

LOG = logging.getLogger(__name__)
SKIPPED_IN_A_ROW = 10
"""Number of steps in a row without an update that ends a run, whatever the configuration says."""


class FiniteGuard:
    """Number of steps that made no update; it ends a run where `EngineConfig.on_nonfinite` says so."""

    def __init__(self, config: EngineConfig, skipped: int = 0) -> None:
        self.config = config
        self.skipped = skipped
        self.in_a_row = 0

    def check(self, step: int, loss: float, norm: float) -> None:
        """Raise `NonFiniteError` where step number `step` (from 1) must be the last; on all ranks alike."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            return
        self.skipped += 1
        self.in_a_row += 1
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm} (loss {loss:.6g})"
        fix = "lower lr, set grad_clip, or look at the batch of this step"
        if self.config.on_nonfinite == "stop":
            raise NonFiniteError(
                f"step {step}: {what}; no update was made. {fix}; on_nonfinite='skip' goes on without the step"
            )
        if self.in_a_row >= SKIPPED_IN_A_ROW:
            raise NonFiniteError(f"step {step}: {what}, and {self.in_a_row} steps in a row made no update: {fix}")

    def check_export(self) -> None:
        """Raise `NonFiniteError` where the last step ended the run: the weights before it may be those that failed.

        A run that continues without such steps exports after them too, and reports how many there were.
        """
        if not self.in_a_row:
            return
        if self.config.on_nonfinite == "skip" and self.in_a_row < SKIPPED_IN_A_ROW:
            LOG.warning(
                "exported after %d skipped steps, the last %d in a row: their loss or gradient was not finite",
                self.skipped,
                self.in_a_row,
            )
            return
        raise NonFiniteError(
            f"the last {self.in_a_row} steps made no update, their loss or gradient was not finite: nothing is "
            "exported; train on, or load an earlier checkpoint"
        )


def finite_tensors(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors. `NonFiniteError` names the first that is not finite: an extreme is NaN where an element is."""
    for name, tensor in tensors:
        known = tensor.is_floating_point() and tensor.numel() > 0
        if known and not all(map(math.isfinite, torch.stack(tensor.aminmax()).tolist())):
            raise NonFiniteError(f"{name} has values that are not finite: training diverged, nothing was exported")
        yield name, tensor

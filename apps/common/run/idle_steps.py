"""Steps in which nothing was trained: they are counted, and too many in a row stop a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runlog import read_metrics
from runlog.notices import IDLE

IN_A_ROW = "train/idle_steps"
ALLOWED = 10
FLAG = "--allow-idle-steps"


class IdleRunError(RuntimeError):
    """Too many steps in a row trained nothing."""


@dataclass
class IdleSteps:
    """Counter of the steps in a row that trained nothing, the same on every rank."""

    allowed: int | None
    """So many stop the run; None: no number does."""
    in_a_row: int = 0

    @staticmethod
    def resumed(allowed: int | None, run_dir: Path, done: int) -> "IdleSteps":
        """Return the counter of a run that goes on after `done` steps; collective."""
        from schedules.runtime.collectives import broadcast_result  # a command line reads ALLOWED without torch

        last = read_metrics(run_dir)[-1:] if done else []
        return IdleSteps(allowed, broadcast_result(int(sum(row.get(IN_A_ROW, 0) for row in last))))

    def row(self, reason: str | None) -> dict[str, Any]:
        """Count a step, which trained nothing where there is a reason; return what the metrics say of it."""
        self.in_a_row = 0 if reason is None else self.in_a_row + 1
        counted: dict[str, Any] = {IN_A_ROW: float(self.in_a_row)}
        return counted if reason is None else counted | {IDLE: reason}

    @property
    def too_many(self) -> bool:
        """Whether the run has to stop."""
        return self.allowed is not None and self.in_a_row >= self.allowed

    def error(self, step: int, reason: str | None, run_dir: Path) -> IdleRunError:
        """Return the error that stops the run after `step`; `reason`: why that step trained nothing."""
        return IdleRunError(
            f"step {step}: {self.in_a_row} steps in a row trained nothing, the last one as {reason}. To go on all the "
            f"same: --resume --run-dir {run_dir} {FLAG} N with a larger N, or None for no limit"
        )


def allowed_problem(allowed: int | None) -> list[str]:
    """Return what is wrong with the flag's value."""
    if allowed is None or allowed >= 1:
        return []
    return [f"{FLAG} must be at least 1, or None for no limit, got {allowed}"]

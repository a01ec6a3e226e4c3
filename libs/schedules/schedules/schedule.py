"""Schedule protocol: what the loop of a run asks of who waits for whom."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from rollout import TaskRow
from rollout.episodes.summary import AnyEpisode
from schedules.protocols import Tasks
from schedules.runtime.collectives import broadcast_result, rank_and_world
from schedules.sampling.first_batch import SamplerCheck
from schedules.sampling.session import Evaluation
from schedules.sampling.settings import RunState
from schedules.sampling.task_state import load_cursor


@dataclass(frozen=True)
class TrainStepResult:
    """Episodes of a step, the advantage of each (0 where it failed), its metrics, and its tasks by group.

    `rows` is None where they are the tasks of that step's number. In a run of several ranks the episodes are summaries
    (`schedules.rows.shared`).
    """

    episodes: Sequence[AnyEpisode]
    advantages: list[float]
    metrics: dict[str, float]
    rows: Sequence[TaskRow] | None = None
    sampler: SamplerCheck | None = None
    """What the first batch showed of the sampler; None of any other."""


class Schedule(Protocol):
    """Schedule of a run; a context manager. Every rank has one."""

    def __enter__(self) -> "Schedule":
        """Begin."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what still runs."""
        ...

    def step(self, step: int) -> TrainStepResult:
        """Do step number `step`, from 0; steps are asked for in order."""
        ...

    def evaluate(self) -> Evaluation:
        """Return responses to the held-out tasks by the weights of the last step that was done."""
        ...

    def saving(self, step: int) -> None:
        """Write beside the checkpoint of `step` steps, about to be saved, what the run needs besides weights.

        Every checkpoint that was begun earlier is whole by then.
        """
        ...

    def saved(self, step: int) -> None:
        """Note that the checkpoint of `step` steps is whole; later steps may have been done meanwhile."""
        ...


def restore_tasks(tasks: Tasks, run: RunState) -> None:
    """Bring the tasks to where they were at the run's checkpoint; every rank calls it."""
    if run.done:
        tasks.restore(broadcast_result(load_cursor(run.run_dir, run.done) if rank_and_world()[0] == 0 else {}))

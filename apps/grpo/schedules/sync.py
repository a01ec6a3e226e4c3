"""Who waits for whom between sampling and training: the face of a schedule, and the plain one, in turn."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

from apps.common.run.ranks import from_rank_0, rank_and_world
from apps.grpo.config import GrpoConfig
from apps.grpo.reporting.timeline import Timeline
from apps.grpo.sampling.memory_turns import sampling_turn
from apps.grpo.sampling.session import Evaluation, Session
from apps.grpo.sampling.vllm import prove_owed
from apps.grpo.schedules.ledger_files import check_ledgers
from apps.grpo.step import StepResult, grpo_step
from apps.grpo.tasks.prompt_tasks import Tasks
from apps.grpo.tasks.task_state import load_cursor, save_cursor
from engines import TrainEngine


class Schedule(Protocol):
    """What the loop of a run asks of its schedule; a context manager. Every rank has one."""

    def __enter__(self) -> "Schedule":
        """Begin."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what still runs."""
        ...

    def step(self, step: int) -> StepResult:
        """Do step number `step`, from 0; steps are asked for in order."""
        ...

    def evaluate(self) -> Evaluation:
        """Return answers to the held-out tasks by the weights of the last step that was done."""
        ...

    def saving(self, step: int) -> None:
        """A checkpoint of `step` steps is about to be saved: keep beside it what the run needs besides weights.

        Every checkpoint that was begun earlier is whole by then.
        """
        ...

    def saved(self, step: int) -> None:
        """The checkpoint of `step` steps is whole; later steps may have been done meanwhile."""
        ...


@dataclass(frozen=True)
class InTurn:
    """Sample, then train, then hand over the weights: nothing is ever stale."""

    config: GrpoConfig
    session: Session
    engine: TrainEngine
    run_dir: Path
    done: int
    timeline: Timeline | None = field(default=None, init=False)
    """Rank 0's."""

    def __post_init__(self) -> None:
        check_ledgers(self.run_dir, "sync", 1, self.done)
        restore_tasks(self.session.tasks, self.run_dir, self.done)
        if rank_and_world()[0] == 0:
            object.__setattr__(self, "timeline", Timeline(self.run_dir, self.done))

    def __enter__(self) -> "InTurn":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing runs between steps."""

    def step(self, step: int) -> StepResult:
        """See `grpo_step`."""
        return grpo_step(self.config, self.session, self.engine, step, self.timeline)

    def evaluate(self) -> Evaluation:
        """See `Session.evaluate`."""
        begun = time.perf_counter()
        with sampling_turn(self.session, self.engine):
            found = self.session.evaluate()
        if self.timeline is not None:
            self.timeline.add("sampler", "evaluate", begun, time.perf_counter())
        prove_owed(self.session, self.engine, found.episodes)
        return found

    def saving(self, step: int) -> None:
        """Where the tasks are."""
        if rank_and_world()[0] == 0:
            save_cursor(self.run_dir, step, self.session.tasks.cursor(), self.config.keep_checkpoints)

    def saved(self, step: int) -> None:
        """Nothing is kept."""


def restore_tasks(tasks: Tasks, run_dir: Path, done: int) -> None:
    """Bring the tasks to where they were at the checkpoint of `done` steps; every rank calls it."""
    if done:
        tasks.restore(from_rank_0(load_cursor(run_dir, done) if rank_and_world()[0] == 0 else {}))

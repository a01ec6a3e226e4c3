"""Synchronous schedule: sample, then train, then sync the weights. Nothing is ever stale."""

import time
from types import TracebackType

from schedules.protocols import Trainer
from schedules.reporting.episode_metrics import rollout_metrics
from schedules.reporting.timeline import Timeline
from schedules.rows.shared import train_step
from schedules.runtime.collectives import rank_and_world
from schedules.sampling.ledger_files import check_ledgers
from schedules.sampling.memory_turns import (
    begin_first_batch,
    check_weights,
    compare_check,
    run_pending_checks,
    sample_check,
    sampling_memory,
)
from schedules.sampling.refill import Rounds
from schedules.sampling.session import Evaluation, RolloutSession
from schedules.sampling.settings import RunState
from schedules.sampling.task_state import save_cursor
from schedules.schedule import TrainStepResult


class SyncSchedule:
    """See the head of this file."""

    def __init__(self, session: RolloutSession, trainer: Trainer, run: RunState) -> None:
        self._session, self._trainer, self._run = session, trainer, run
        check_ledgers(run.run_dir, "sync", 1, run.done)
        self._rounds = Rounds(session.tasks, session.settings, run)
        self._timeline = Timeline(run.run_dir, run.done) if rank_and_world()[0] == 0 else None

    def __enter__(self) -> "SyncSchedule":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: nothing runs between steps."""

    def step(self, step: int) -> TrainStepResult:
        """Do step number `step`, from 0; see `sync_step`."""
        return sync_step(self._session, self._trainer, step, self._timeline, self._rounds)

    def evaluate(self) -> Evaluation:
        """Return responses to the held-out tasks; see `RolloutSession.evaluate`."""
        begun = time.perf_counter()
        with sampling_memory(self._session, self._trainer):
            evaluation = self._session.evaluate()
        if self._timeline is not None:
            self._timeline.add("sampler", "evaluate", begun, time.perf_counter())
        run_pending_checks(self._session, self._trainer, evaluation.episodes)
        return evaluation

    def saving(self, step: int) -> None:
        """Write where the tasks are."""
        if rank_and_world()[0] == 0:
            save_cursor(self._run.run_dir, step, self._rounds.place(), self._run.keep_checkpoints)

    def saved(self, step: int) -> None:
        """Do nothing: nothing is kept."""


def sync_step(
    session: RolloutSession,
    trainer: Trainer,
    step: int,
    timeline: Timeline | None = None,
    rounds: Rounds | None = None,
) -> TrainStepResult:
    """Do step number `step`, from 0; then the sampler has the new weights. `timeline` is told who was busy when.

    Without `rounds` the step's groups are taken as they are. A sampler that sleeps wakes once a step: its weights are
    checked while it samples the next one.
    """
    begun, sleeps = time.perf_counter(), session.settings.sleep
    with sampling_memory(session, trainer):
        filled = None if rounds is None else rounds.step(lambda _, rows, __: session.play_groups(rows))
        # each with the reward that its task gave
        episodes = session.sample(step) if filled is None else filled.episodes
        samples = sample_check(session, episodes) if sleeps and session.check.pending else None
    checked = compare_check(session, trainer, samples)
    run_pending_checks(session, trainer, episodes)
    sampled = time.perf_counter()
    begin_first_batch(session, trainer, episodes)
    result = train_step(trainer, step, episodes)
    check = session.first.end(step, result)
    trained = time.perf_counter()
    transfer = session.sync(trainer)
    ended = time.perf_counter()
    if timeline is not None:
        timeline.add("sampler", "sample", begun, sampled)
        timeline.add("trainer", "train", sampled, trained)
        timeline.add("weights", "sync", trained, ended)
    checked |= {} if sleeps else check_weights(session, trainer, episodes)
    metrics = result.metrics | transfer.metrics | checked
    metrics |= {} if check is None else check.metrics
    metrics |= rollout_metrics(episodes, session.environment_of)
    metrics |= {} if filled is None else filled.metrics
    metrics |= {
        "weights/version": float(session.sampler.version),
        "time/rollout_s": sampled - begun,
        "time/train_s": trained - sampled,
        "time/export_and_update_weights_s": ended - trained,
        "time/step_s": ended - begun,
    }
    metrics["tokens_per_second"] = metrics["rollout/tokens"] / metrics["time/step_s"]
    return TrainStepResult(episodes, result.advantages, metrics, None if filled is None else filled.rows, check)

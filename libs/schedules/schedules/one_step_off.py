"""One step off: the responses of step k + 1 are sampled by the weights that step k starts from, while it is trained.

1. Step k's episodes are there. Sampling of k + 1 begins in a thread; step k is trained in this one.
2. When both are done the sampler gets the new weights. So a step's episodes are one version old, all of them (those of
   the first step none), whatever threads do: equal runs give equal bits.
3. A checkpoint of step k goes with the episodes of step k + 1, which are there by then, in the ledger: a run that goes
   on from it trains on the very same ones.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from rollout import Episode, RolloutLedger, TaskRow
from rollout.episodes.codec import decode_episodes, encode_episodes
from rollout.workers.process import WorkerDied
from schedules.protocols import Trainer
from schedules.reporting.episode_metrics import rollout_metrics
from schedules.reporting.timeline import Timeline
from schedules.rollout_thread import RolloutThread
from schedules.runtime.collectives import all_agree, rank_and_world
from schedules.sampling.ledger_files import PER_RANK, check_ledgers
from schedules.sampling.memory_turns import begin_first_batch, check_weights, run_pending_checks
from schedules.sampling.session import Evaluation, RolloutSession
from schedules.sampling.settings import RunState
from schedules.sampling.task_state import save_cursor
from schedules.schedule import TrainStepResult, restore_tasks


class OneStepOffSchedule:
    """See the head of this file."""

    def __init__(self, session: RolloutSession, trainer: Trainer, run: RunState) -> None:
        self._session, self._trainer, self._run = session, trainer, run
        rank, world = rank_and_world()
        check_ledgers(run.run_dir, "one_step_off", world, run.done)
        restore_tasks(session.tasks, run)
        self._ledger = RolloutLedger(run.run_dir / PER_RANK.format(rank), run.done)
        self._timeline = Timeline(run.run_dir, run.done) if rank == 0 else None
        self._sampling: RolloutThread[list[Episode]] | None = None
        self._rows: Sequence[TaskRow] = ()
        self._mine: list[Episode] | None = None

    def __enter__(self) -> "OneStepOffSchedule":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
        self._ledger.close()

    def step(self, step: int) -> TrainStepResult:
        """Train on the episodes that are there, and sample the next ones meanwhile."""
        session, trainer = self._session, self._trainer
        begun = time.perf_counter()
        if self._mine is None:
            self._begin(step)
            self._mine = self._ended(step)
        rows, episodes = self._rows, session.gather(self._mine)
        self._mine = None
        run_pending_checks(session, trainer, episodes)
        begin_first_batch(session, trainer, episodes)
        first, version = time.perf_counter(), session.sampler.version
        if step + 1 < self._run.steps:
            self._begin(step + 1)
        self._ledger.train(step + 1, [step])
        result = trainer.train(step, episodes)
        check = session.first.end(step, result)
        trained = time.perf_counter()
        if step + 1 < self._run.steps:
            self._mine = self._ended(step + 1, trained=True)
        sampled = time.perf_counter()
        transfer = session.sync(trainer)
        ended = time.perf_counter()
        metrics = result.metrics | transfer.metrics | check_weights(session, trainer, episodes)
        metrics |= {} if check is None else check.metrics
        metrics |= rollout_metrics(episodes, session.environment_of)
        metrics |= {
            "weights/version": float(session.sampler.version),
            "schedule/staleness": version - metrics.get("rollout/policy_version", version),
            "time/train_s": trained - first,
            "time/wait_for_rollout_s": sampled - trained + first - begun,
            "time/export_and_update_weights_s": ended - sampled,
            "time/step_s": ended - begun,
        }
        metrics["tokens_per_second"] = metrics["rollout/tokens"] / metrics["time/step_s"]
        if self._timeline is not None:
            self._timeline.add("trainer", "train", first, trained)
            self._timeline.add("weights", "sync", sampled, ended)
        return TrainStepResult(episodes, result.advantages, metrics, rows, check)

    def evaluate(self) -> Evaluation:
        """Return responses to the held-out tasks: nothing is sampled between two steps."""
        evaluation = self._session.evaluate()
        run_pending_checks(self._session, self._trainer, evaluation.episodes)
        return evaluation

    def saving(self, step: int) -> None:
        """Write where the tasks are; the next step's episodes are in the ledger already."""
        if rank_and_world()[0] == 0:
            save_cursor(self._run.run_dir, step, self._session.tasks.cursor(), self._run.keep_checkpoints)

    def saved(self, step: int) -> None:
        """Let the ledger drop what the checkpoint holds."""
        self._ledger.saved(step)

    def _begin(self, step: int) -> None:
        """Sample the episodes of a step, where no earlier run has them in the ledger."""
        self._rows = self._session.tasks.tasks(step, self._session.settings.prompts_per_step)
        if step not in self._ledger.state.sampled:
            self._ledger.started(step, self._session.sampler.version)
            self._sampling = RolloutThread(self._session.rollout_local(self._rows))

    def _ended(self, step: int, trained: bool = False) -> list[Episode]:
        """Return the episodes, once they are there. `trained`: a step was trained meanwhile."""
        episodes: list[Episode] | None = None
        if self._sampling is None:
            episodes = decode_episodes(self._ledger.payload(step))
        else:
            with suppress(WorkerDied):
                episodes = self._sampling.result()
        if not all_agree(episodes is not None):  # one's sampler died; its weights are gone: the present ones sample
            if episodes is None:
                self._ledger.again(step)
                self._ledger.started(step, self._session.sampler.version)
            again = self._session.run(lambda: self._session.rollout_local(self._rows), trained)
            episodes = again if episodes is None else episodes
        assert episodes is not None
        if self._sampling is not None:
            if self._timeline is not None:
                self._timeline.add("sampler", "sample", *self._sampling.seconds)
            self._sampling = None
            self._ledger.finished(step, encode_episodes(episodes))
        return episodes

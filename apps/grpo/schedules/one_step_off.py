"""One step off: the answers of step k + 1 are sampled by the weights that step k starts from, while it is trained.

1. Step k's answers are there. Sampling of k + 1 begins in a thread; step k is trained in this one.
2. When both are done the sampler gets the new weights. So a step's answers are one version old, all of them (those of
   the first step none), whatever threads do: equal runs give equal bits.
3. A checkpoint of step k goes with the answers to step k + 1, which are there by then, in the ledger: a run that goes
   on from it trains on the very same ones.
"""

import asyncio
import threading
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from apps.common.run.ranks import all_ranks, rank_and_world
from apps.grpo.config import GrpoConfig
from apps.grpo.reporting.timeline import Timeline
from apps.grpo.sampling.session import Evaluation, Session
from apps.grpo.sampling.vllm import prove_owed, prove_weights
from apps.grpo.schedules.ledger_files import AHEAD, check_ledgers
from apps.grpo.schedules.sync import restore_tasks
from apps.grpo.step import StepResult, advantages_of, episode_advantages, rollout_metrics, train_on
from apps.grpo.tasks.task_state import save_cursor
from engines import TrainEngine
from rollout import Episode, RolloutLedger, TaskRow, to_batch
from rollout.episodes.codec import decode_episodes, encode_episodes
from rollout.workers.process import WorkerDied

T = TypeVar("T")


class Background(Generic[T]):
    """A coroutine on an event loop of its own, in a thread."""

    def __init__(self, job: Coroutine[Any, Any, T]) -> None:
        self._found: T | None = None
        self._error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(job)
        self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)
        self.seconds = (0.0, 0.0)
        self._thread.start()

    def result(self) -> T:
        """Wait for it; what it raised is raised here."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found  # type: ignore[return-value]

    def cancel(self) -> None:
        """End it, and wait until it has ended."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        begun = time.perf_counter()
        try:
            self._loop.run_until_complete(asyncio.wait([self._task]))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()
        self.seconds = (begun, time.perf_counter())
        if self._task.cancelled():
            self._error = asyncio.CancelledError()
        elif (error := self._task.exception()) is not None:
            self._error = error
        else:
            self._found = self._task.result()


class OneStepOff:
    """See the head of this file. `done`: steps that the checkpoint holds which the run goes on from."""

    def __init__(self, config: GrpoConfig, session: Session, engine: TrainEngine, run_dir: Path, done: int) -> None:
        self._config, self._session, self._engine = config, session, engine
        rank, world = rank_and_world()
        self._run_dir = run_dir
        check_ledgers(run_dir, "one_step_off", world, done)
        restore_tasks(session.tasks, run_dir, done)
        self._ledger = RolloutLedger(run_dir / AHEAD.format(rank), done)
        self._timeline = Timeline(run_dir, done) if rank == 0 else None
        self._sampling: Background[list[Episode]] | None = None
        self._rows: Sequence[TaskRow] = ()
        self._mine: list[Episode] | None = None

    def __enter__(self) -> "OneStepOff":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
        self._ledger.close()

    def step(self, step: int) -> StepResult:
        """Train on the answers that are there, and sample the next ones meanwhile."""
        config, session, engine = self._config, self._session, self._engine
        begun = time.perf_counter()
        if self._mine is None:
            self._begin(step)
            self._mine = self._ended(step)
        rows, episodes = self._rows, session.gathered(self._mine)
        self._mine = None
        prove_owed(session, engine, episodes)
        first, version = time.perf_counter(), session.sampler.version
        if step + 1 < config.steps:
            self._begin(step + 1)
        self._ledger.train(step + 1, [step])
        batch = to_batch(episodes)
        batch["advantages"] = advantages_of(batch, config, step)
        metrics = train_on(batch, config, engine)
        trained = time.perf_counter()
        if step + 1 < config.steps:
            self._mine = self._ended(step + 1, trained=True)
        sampled = time.perf_counter()
        handed = session.sync(engine)
        ended = time.perf_counter()
        metrics |= handed.metrics | prove_weights(session, engine, episodes)
        metrics |= rollout_metrics(episodes, session.environment_of)
        metrics |= {
            "weights/version": float(session.sampler.version),
            "schedule/staleness": version - metrics["rollout/policy_version"],
            "time/train_s": trained - first,
            "time/wait_for_rollout_s": sampled - trained + first - begun,
            "time/export_and_update_weights_s": ended - sampled,
            "time/step_s": ended - begun,
        }
        metrics["tokens_per_second"] = metrics["rollout/tokens"] / metrics["time/step_s"]
        if self._timeline is not None:
            self._timeline.add("trainer", "train", first, trained)
            self._timeline.add("weights", "sync", sampled, ended)
        return StepResult(episodes, episode_advantages(batch, len(episodes)), metrics, rows)

    def evaluate(self) -> Evaluation:
        """Return nothing is sampled between two steps: see `Session.evaluate`."""
        found = self._session.evaluate()
        prove_owed(self._session, self._engine, found.episodes)
        return found

    def saving(self, step: int) -> None:
        """Where the tasks are; the next step's answers are in the ledger already."""
        if rank_and_world()[0] == 0:
            save_cursor(self._run_dir, step, self._session.tasks.cursor(), self._config.keep_checkpoints)

    def saved(self, step: int) -> None:
        """The ledger need not keep what the checkpoint holds."""
        self._ledger.saved(step)

    def _begin(self, step: int) -> None:
        """Sample the answers of a step, where no earlier run has them in the ledger."""
        self._rows = self._session.tasks.tasks(step, self._config.prompts)
        if step not in self._ledger.state.sampled:
            self._ledger.begun(step, self._session.sampler.version)
            self._sampling = Background(self._session.answers(self._rows))

    def _ended(self, step: int, trained: bool = False) -> list[Episode]:
        """Return the answers, once they are there. `trained`: a step was trained meanwhile."""
        found: list[Episode] | None = None
        if self._sampling is None:
            found = decode_episodes(self._ledger.payload(step))
        else:
            with suppress(WorkerDied):
                found = self._sampling.result()
        if not all_ranks(found is not None):  # one's sampler died; its weights are gone, so the present ones answer
            if found is None:
                self._ledger.again(step)
                self._ledger.begun(step, self._session.sampler.version)
            answers = self._session.asked(lambda: self._session.answers(self._rows), trained)
            found = answers if found is None else found
        assert found is not None
        if self._sampling is not None:
            if self._timeline is not None:
                self._timeline.add("sampler", "sample", *self._sampling.seconds)
            self._sampling = None
            self._ledger.finished(step, encode_episodes(found))
        return found

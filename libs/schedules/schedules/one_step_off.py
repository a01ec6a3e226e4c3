"""One step off: the responses of step k + 1 are sampled by the weights that step k starts from, while it is trained.

1. Step k's episodes are there. Sampling of k + 1 begins in a thread; step k is trained in this one.
2. When both are done the sampler gets the new weights. So a step's episodes are one version old, all of them (those of
   the first step none), whatever threads do: equal runs give equal bits.
3. A checkpoint of step k goes with the episodes of step k + 1, which are there by then, in the ledger: a run that goes
   on from it trains on the very same ones.
4. Groups without signal that are left out (`filter_groups`) are replaced after the training, by the same weights, in
   rounds that all ranks make together (`Rounds`). The ledger has a rank's part of each round under its number: with
   the groups that are trained, or as without signal.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from rollout import Episode, RolloutLedger, TaskRow
from rollout.episodes.codec import decode_episodes, encode_episodes
from rollout.episodes.summary import AnyEpisode
from rollout.workers.process import WorkerDied
from schedules.protocols import Trainer
from schedules.reporting.episode_metrics import rollout_metrics
from schedules.reporting.timeline import Timeline
from schedules.rollout_thread import RolloutThread
from schedules.rows.shared import train_step
from schedules.runtime.collectives import all_agree, broadcast_result, rank_and_world
from schedules.sampling.ledger_files import PER_RANK, check_ledgers
from schedules.sampling.memory_turns import begin_first_batch, check_weights, run_pending_checks
from schedules.sampling.refill import Filled, Rounds, with_signal
from schedules.sampling.session import Evaluation, RolloutSession
from schedules.sampling.settings import RunState
from schedules.sampling.task_state import run_number, save_cursor
from schedules.schedule import TrainStepResult


class OneStepOffSchedule:
    """See the head of this file."""

    def __init__(self, session: RolloutSession, trainer: Trainer, run: RunState) -> None:
        self._session, self._trainer, self._run = session, trainer, run
        rank, world = rank_and_world()
        check_ledgers(run.run_dir, "one_step_off", world, run.done)
        self._rounds = Rounds(session.tasks, session.settings, run)
        self._place = self._rounds.place()
        number = broadcast_result(run_number(run.run_dir) if rank == 0 else None)
        self._ledger = RolloutLedger(run.run_dir / PER_RANK.format(rank), run.done, run=number)
        self._timeline = Timeline(run.run_dir, run.done) if rank == 0 else None
        self._sampling: RolloutThread[list[Episode]] | None = None
        self._next: Filled | None = None

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
        if self._next is None:
            self._begin()
            self._next = self._ended()
        filled, self._next = self._next, None
        episodes = filled.episodes
        run_pending_checks(session, trainer, episodes)
        begin_first_batch(session, trainer, episodes)
        first, version = time.perf_counter(), session.sampler.version
        if step + 1 < self._run.steps:
            self._begin()
        self._ledger.train(step + 1, [n for n in filled.rounds if n in self._ledger.state.sampled])
        result = train_step(trainer, step, episodes)
        check = session.first.end(step, result)
        trained = time.perf_counter()
        if step + 1 < self._run.steps:
            self._next = self._ended(trained=True)
        sampled = time.perf_counter()
        transfer = session.sync(trainer)
        ended = time.perf_counter()
        metrics = result.metrics | transfer.metrics | check_weights(session, trainer, episodes)
        metrics |= {} if check is None else check.metrics
        metrics |= rollout_metrics(episodes, session.environment_of) | dict(filled.metrics)
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
        return TrainStepResult(episodes, result.advantages, metrics, filled.rows, check)

    def evaluate(self) -> Evaluation:
        """Return responses to the held-out tasks: nothing is sampled between two steps."""
        evaluation = self._session.evaluate()
        run_pending_checks(self._session, self._trainer, evaluation.episodes)
        return evaluation

    def saving(self, step: int) -> None:
        """Write where the tasks are; the next step's episodes are in the ledger already."""
        if rank_and_world()[0] == 0:
            place = self._rounds.place() if self._next is None else self._place
            save_cursor(self._run.run_dir, step, place, self._run.keep_checkpoints)

    def saved(self, step: int) -> None:
        """Let the ledger drop what the checkpoint holds."""
        self._ledger.saved(step)

    def _begin(self) -> None:
        """Sample the first round of the next step, where no earlier run has it in the ledger."""
        self._place, number, state = self._rounds.place(), self._rounds.round, self._ledger.state
        if number not in state.sampled and number not in state.done:
            rows, _ = self._rounds.ahead(self._session.settings.prompts_per_step)
            self._ledger.started(number, self._session.sampler.version)
            self._sampling = RolloutThread(self._session.rollout_local(rows))

    def _ended(self, trained: bool = False) -> Filled:
        """Return the groups of the step that `_begin` began, once they are there. `trained`: a step was trained
        meanwhile."""
        return self._rounds.step(lambda number, rows, final: self._play(number, rows, final, trained))

    def _play(self, number: int, rows: Sequence[TaskRow], final: bool, trained: bool) -> list[AnyEpisode]:
        """Return the episodes of a round, of all ranks; `final`: its groups are taken as they are."""
        ledger, mine = self._ledger, list[Episode]()
        there = number in ledger.state.done
        if number in ledger.state.sampled:
            mine, there = decode_episodes(ledger.payload(number)), True
        elif self._sampling is not None:
            with suppress(WorkerDied):
                mine, there = self._sampling.result(), True
        if not all_agree(there):  # a later round; or one's sampler died; its weights are gone: the present ones sample
            if not there:
                if number in ledger.state.running:
                    ledger.again(number)
                ledger.started(number, self._session.sampler.version)
            again = self._session.run(lambda: self._session.rollout_local(rows), trained)
            mine = mine if there else again
        if self._sampling is not None:
            if self._timeline is not None:
                self._timeline.add("sampler", "sample", *self._sampling.seconds)
            self._sampling = None
        if number in ledger.state.running:
            kept = mine if final else with_signal(mine, self._session.settings.filter_groups)
            if kept or final:
                ledger.finished(number, encode_episodes(kept))
            else:
                ledger.no_signal(number)
        return self._session.gather(mine)

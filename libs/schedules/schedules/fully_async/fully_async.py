"""Fully asynchronous: a process samples, this one trains, and `StalenessController` says who may do what.

1. Groups are numbered in the order of the run's tasks. Every decision and every event goes through `_tell`, under one
   lock, and into the ledger before it is obeyed: a group before it is sampled, its episodes before they are counted (or
   that it ended without signal: `filter_groups`), a step's groups before it is trained.
2. The thread that hears the sampling process begins new groups, also while this one trains. Training and weight syncs
   wait in a queue for this thread, in `step`.
3. A sampling process that dies loses what it was sampling, nothing else: another one is started with the present
   weights, and those groups begin again. It is given up after `RESTARTS` deaths without a group between them,
   whatever it was at when it died: a weight sync counts too.
4. A run that goes on from a checkpoint first trains the recorded steps after it again, on the recorded episodes, and
   takes finished groups from the ledger; what was being sampled begins again. Nothing is skipped or trained twice.
5. Every weight sync is checked by responses that are asked for at once, beside what is sampled, and waited for before
   weights change again or the run ends; those to a replacement and at a resume too. Where no prompt is known yet, the
   first step's are asked. A step's metrics tell of the weight sync before it, the last step's of both.
6. Over several ranks all this is rank 0's, and what ranks do together is ordered: see `schedules.fully_async.follower`.
"""

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Literal

from rollout import RolloutLedger, StalenessController
from rollout.control.staleness import (
    Begin,
    Event,
    Failed,
    Finished,
    NoSignal,
    Sync,
    Synced,
    SyncFailed,
    Train,
    Trained,
)
from rollout.episodes.codec import decode_episodes
from rollout.episodes.summary import AnyEpisode
from rollout.workers.channel import Message
from rollout.workers.process import WorkerDied
from rollout.workers.protocol import Workers
from schedules.config import ScheduleConfig
from schedules.fully_async.async_state import control_state, resume_version, staleness_settings, weights_due
from schedules.fully_async.checked_training import CheckedTraining
from schedules.fully_async.follower import Leader, SendWeights, StepDone, recorded_episodes
from schedules.fully_async.pending_checks import PendingChecks
from schedules.protocols import Tasks, Trainer, environment_of
from schedules.reporting.episode_metrics import age_metrics, rollout_metrics
from schedules.reporting.live import EVERY, PeriodicTask, RemoteLoad, Show
from schedules.reporting.timeline import SamplerLane, Timeline
from schedules.rows.shared import gather_episodes
from schedules.runtime.interrupts import Runner, defer_interrupts
from schedules.sampling.ledger_files import SHARED, check_ledgers
from schedules.sampling.numbered_tasks import NumberedRows
from schedules.sampling.refill import GroupFilter
from schedules.sampling.restarts import RESTARTS, SamplingProcess
from schedules.sampling.sampler_process import StartSampling
from schedules.sampling.session import Evaluation, evaluation_of
from schedules.sampling.settings import RunState
from schedules.sampling.task_state import load_cursor, run_number, save_cursor
from schedules.schedule import TrainStepResult
from schedules.weights.transfer_result import TransferResult
from schedules.weights.weight_sync import sync_weights


class FullyAsyncSchedule:
    """See the head of this file; of rank 0. `start` starts what samples; `show` is told what goes on."""

    def __init__(
        self,
        config: ScheduleConfig,
        tasks: Tasks,
        trainer: Trainer,
        start: StartSampling,
        run: RunState,
        runner: Runner,
        show: Show | None = None,
    ) -> None:
        self._tasks, self._trainer, self._start_sampling = tasks, trainer, start
        self._run, self._runner, self._show = run, runner, show
        run_dir, done, prompts = run.run_dir, run.done, start.settings.prompts_per_step
        self._settings = staleness_settings(config, prompts, run.steps)
        check_ledgers(run_dir, "fully_async", 1, done)
        self._ledger = RolloutLedger(run_dir / SHARED, done, run=run_number(run_dir))
        place = load_cursor(run_dir, done) if done else None
        self._rows = NumberedRows(tasks, prompts, place)
        self._replay = dict(self._ledger.state.batches)
        self._controller = StalenessController(self._settings, control_state(self._settings, self._ledger.state, done))
        self._lock = threading.Lock()
        self._queue: queue.Queue[Train | Sync | BaseException] = queue.Queue()
        self._closing = False
        self._leader = Leader()
        self._process = SamplingProcess(self._start, self._give, resume_version(self._settings, done))
        self._begun: dict[int, Workers] = {}  # by group: who samples it
        self._filter = GroupFilter(start.settings, self._settings.batch, run_dir)
        self._timeline = Timeline(run_dir, done)
        self._sampling = SamplerLane(self._timeline)
        self._load = RemoteLoad()
        self._progress = PeriodicTask(self._show_live)
        self._checks = PendingChecks(lambda: self._living(checked=False))
        self._training = CheckedTraining(trainer, self._leader, self._living)

    def __enter__(self) -> "FullyAsyncSchedule":
        begun = False
        try:
            self._process.begin()
            self._checks.synced(self._process.version)
            self._progress.begin()
            if not self._replay:
                self._open()
            self._leader.order(StepDone())
            begun = True
        finally:
            if not begun:
                self._end()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._closing = True
        try:
            with self._lock:
                self._sampling.rests()
        finally:
            self._process.close()
            self._progress.end()
            self._ledger.close()

    def step(self, step: int) -> TrainStepResult:
        """Wait for the groups of the step, train on them, and sync weights where that is due."""
        result = self._step(step)
        self._leader.order(StepDone(result.metrics))
        return result

    def _step(self, step: int) -> TrainStepResult:
        begun = time.perf_counter()
        if step + 1 in self._replay:
            result = self._train(Train(step + 1, self._replay.pop(step + 1), 0), begun)
            if weights_due(self._settings, step + 1):
                self._process.push(self._settings.version_of(step + 1))
                self._checks.synced(self._process.version, result.episodes)
            if not self._replay:
                self._open()
        else:
            decision = self._next(Train)
            assert isinstance(decision, Train)
            assert decision.step == step + 1
            result = self._train(decision, begun)
            self._tell(Trained())
            if weights_due(self._settings, step + 1):
                result.metrics.update(self._synced(result.episodes))
        if step + 1 == self._settings.total_steps:
            for name, value in self._run_checks().items():  # beside those of the sync before
                result.metrics[name] = max(value, result.metrics.get(name, value))
        ended = time.perf_counter()
        result.metrics["time/step_s"] = ended - begun
        result.metrics["tokens_per_second"] = result.metrics["rollout/tokens"] / (ended - begun)
        return result

    def evaluate(self) -> Evaluation:
        """Return greedy responses to the held-out tasks by the sampling process, beside what it samples."""
        begun = time.perf_counter()
        while True:
            asked = self._living().call("evaluate")
            self._leader.wait_for([asked])
            try:
                mine = decode_episodes(asked.result()[1])
                break
            except WorkerDied:
                continue
        if self._controller.done:  # no step follows whose training would wait for a check
            self._checks.known(mine)
            self._run_checks()
        self._leader.order(StepDone())  # then all know the episodes
        episodes = gather_episodes(mine)
        self._timeline.add("trainer", "evaluate", begun, time.perf_counter())
        return evaluation_of(self._tasks, episodes, self._tasks.held_out())

    def saving(self, step: int) -> None:
        """Write from where the tasks go on that the checkpoint does not hold."""
        with self._lock:
            place = self._rows.place(self._oldest())
        save_cursor(self._run.run_dir, step, place, self._run.keep_checkpoints)

    def saved(self, step: int) -> None:
        """Let the ledger drop what the checkpoint holds."""
        with self._lock:
            self._ledger.saved(step)
            self._rows.forget(self._oldest())

    def _oldest(self) -> int:
        """Return the lowest group that is not trained."""
        state = self._controller.state
        under_way = [g.group for g in (*state.running, *state.ready, *state.training)]
        return min([*state.again, *under_way, *(g for groups in self._replay.values() for g in groups), state.next])

    # -- the controller's thread-safe side -------------------------------------------------------------------------

    def _open(self) -> None:
        """Let the controller decide for the first time."""
        with self._lock:
            self._obey(self._controller.begin())

    def _tell(self, event: Event) -> None:
        with defer_interrupts(), self._lock:
            self._obey(self._controller.handle(event))

    def _obey(self, decisions: Sequence[Begin | Train | Sync]) -> None:
        """Record, then do; the caller holds the lock."""
        todo = list(decisions)
        for decision in todo:
            if isinstance(decision, Begin):
                self._ledger.started(decision.group, decision.version)
                if self._filter.skips(self._rows[decision.group]):
                    self._ledger.no_signal(decision.group)
                    todo += self._controller.handle(NoSignal(decision.group))
                else:
                    self._play(decision.group)
            else:
                if isinstance(decision, Train):
                    self._ledger.train(decision.step, decision.groups)
                self._queue.put(decision)

    def _play(self, group: int) -> None:
        self._sampling.runs()
        worker = self._begun[group] = self._process.worker
        state = self._controller.state
        oldest = min([*state.again, *(g.group for g in state.running), state.next])
        future = worker.call("play", group=group, oldest=oldest)
        future.add_done_callback(lambda future: self._ended(worker, group, future))

    def _ended(self, worker: Workers, group: int, future: "Future[Message]") -> None:
        """Record a group that was sampled, or the death of its process; in the thread that hears it. What a process
        whose groups count as lost still sends is dropped: another one samples them."""
        error = future.exception()
        if error is not None:
            if self._begun.get(group) is worker and not (self._closing and isinstance(error, WorkerDied)):
                self._queue.put(error)
            return
        if self._closing:
            return
        try:
            with self._lock:
                if self._begun.get(group) is not worker:
                    return
                self._process.works()
                self._count_out(group)
                if dropped := self._filter.drops(self._rows[group], payload := future.result()[1]):
                    self._ledger.no_signal(group)
                else:
                    self._ledger.finished(group, payload)
                self._obey(self._controller.handle(NoSignal(group) if dropped else Finished(group)))
        except BaseException as broken:  # a future keeps what its callbacks raise to itself
            self._queue.put(broken)
            raise

    def _count_out(self, group: int) -> None:
        del self._begun[group]
        if not self._begun:
            self._sampling.rests()

    # -- this thread ----------------------------------------------------------------------------------------------

    def _next(self, kind: type[Train] | type[Sync]) -> Train | Sync:
        """Return the next decision of that kind; a dead process is replaced on the way, any other error is raised."""
        while True:
            try:
                decision = self._queue.get(timeout=EVERY)
            except queue.Empty:
                self._leader.waits()
                continue
            if isinstance(decision, WorkerDied):
                self._living()
            elif isinstance(decision, BaseException):
                raise decision
            else:
                assert isinstance(decision, kind), f"{decision} while waiting for {kind.__name__}"
                return decision

    def _show_live(self) -> None:
        if self._show is None:
            return
        with self._lock:
            state, staleness = self._controller.state, self._controller.staleness
        groups = {"queue": len(state.ready), "sampling": len(state.running), "staleness": staleness}
        self._show(groups | self._load.values(self._process.worker))

    def _train(self, decision: Train, begun: float) -> TrainStepResult:
        """Return one step on the recorded episodes of its groups, in the order of the tasks."""
        sampled = time.perf_counter()
        with self._lock:
            payloads = [self._ledger.payload(group) for group in decision.groups]
            rows, version = [self._rows[group] for group in decision.groups], self._controller.version
        mine, decoded = recorded_episodes(payloads), time.perf_counter()
        self._checks.known(mine)
        metrics = self._run_checks()  # the weights are about to change
        shared = not self._replay and weights_due(self._settings, decision.step - 1)
        ready = time.perf_counter()
        episodes, result, check = self._training.train(decision.step, mine, version if shared else None)
        metrics |= result.metrics | ({} if check is None else check.metrics)
        self._timeline.add("trainer", "train", ready, trained := time.perf_counter())
        metrics |= rollout_metrics(episodes, lambda task: environment_of(self._tasks, task))
        metrics |= self._schedule_metrics(episodes, version, decision.staleness)
        metrics |= {
            "time/wait_for_rollout_s": sampled - begun,
            "time/wait_for_weight_checks_s": ready - decoded,
            "time/train_s": decoded - sampled + trained - ready,
            "time/step_s": trained - begun,
        }
        metrics["tokens_per_second"] = metrics["rollout/tokens"] / (trained - begun)
        return TrainStepResult(episodes, result.advantages, metrics, rows, check)

    def _schedule_metrics(self, episodes: Sequence[AnyEpisode], version: int, staleness: int) -> dict[str, float]:
        """Return how old the step's tokens are, and what waits behind it."""
        with self._lock:
            state, dropped = self._controller.state, self._filter.metrics()
        waiting = {"schedule/queue": float(len(state.ready)), "schedule/running": float(len(state.running))}
        return {"schedule/staleness": float(staleness), **age_metrics(episodes, version), **waiting, **dropped}

    def _synced(self, episodes: Sequence[AnyEpisode]) -> dict[str, float]:
        """Send the weights as soon as the controller says so; a transfer that fails is tried again. Their check, by the
        step's `episodes`, is asked for before new groups begin, whose prompts it would wait behind."""
        begun, failures = time.perf_counter(), list[RuntimeError]()
        while True:
            decision = self._next(Sync)
            assert isinstance(decision, Sync)
            waited, worker = time.perf_counter(), self._living(checked=False)
            try:
                transfer = self._give(worker, decision.version, decision.interrupt)
            except RuntimeError as error:
                failures.append(error)
                if len(failures) > RESTARTS:
                    raise RuntimeError(f"weights failed {len(failures)} times, at first: {failures[0]}") from error
                self._process.fail(error)
                self._living(checked=False)
                self._tell(SyncFailed())
                continue
            break
        ended = time.perf_counter()
        self._timeline.add("weights", "sync", waited, ended)
        with self._lock:
            self._sampling.held(ended - transfer.times.paused_s, ended)
        self._process.version = decision.version
        self._checks.synced(decision.version, episodes)
        self._tell(Synced())
        return {
            "weights/version": float(decision.version),
            # a sampler that reads a checkpoint's names measures the rest itself
            **(transfer.metrics if self._start_sampling.module_names else {"weights/bytes": float(transfer.nbytes)}),
            "time/wait_for_sync_s": waited - begun,
            "time/export_and_update_weights_s": ended - waited,
        }

    def _run_checks(self) -> dict[str, float]:
        """Return the metrics of the check that samplers have the weights of the last sync, which the trainer still
        has."""
        return self._checks.run(self._trainer, self._leader)

    # -- the sampling process --------------------------------------------------------------------------------------

    def _start(self, version: int) -> Workers:
        """Return a process from the model that the run began with, under this number."""
        with self._lock:
            place = self._rows.place(self._oldest())
        return self._start_sampling(version, place, self._leader.wait_for)

    def _give(self, worker: Workers, version: int, interrupt: bool = False) -> TransferResult:
        """Send a worker the present weights."""
        module_names = self._start_sampling.module_names
        pause: Literal["abort"] | None = "abort" if interrupt else None
        self._leader.order(SendWeights(version, module_names))
        return sync_weights(self._trainer, worker, version, self._runner, module_names=module_names, pause=pause)

    def _living(self, checked: bool = True) -> Workers:
        """Return the process; one that died is replaced, and what it was sampling begins again. `checked`: the
        weights of the one in its place are checked."""
        before, lost = self._process.worker, list[int]()
        worker = self._process.replace_if_dead(lambda: lost.extend(self._lost()))
        if checked and worker is not before:
            self._checks.synced(self._process.version)  # before new groups begin, whose prompts it would wait behind
        with self._lock:
            for group in lost:
                self._ledger.again(group)
                self._obey(self._controller.handle(Failed(group)))
        return self._process.worker

    def _lost(self) -> list[int]:
        """Return the groups that a dead process was sampling, which nobody samples any more."""
        with self._lock:
            lost = sorted(self._begun)
            for group in lost:
                self._count_out(group)
        return lost

"""Fully asynchronous: a process samples, this one trains, and `StalenessController` says who may do what.

1. Groups are numbered in the order of the run's tasks. Every decision and every event goes through `_tell`, under one
   lock, and into the ledger before it is obeyed: a group before it is sampled, its episodes before they are counted, a
   step's groups before it is trained.
2. The thread that hears the sampling process begins new groups, also while this one trains. Training and handing over
   weights wait in a queue for this thread, in `step`.
3. A sampling process that dies loses what it was sampling, nothing else: another one is started with the present
   weights, and those groups begin again. It is given up after `RESTARTS` deaths without a group between them,
   whatever it was at when it died: a hand-over of weights counts too.
4. A run that goes on from a checkpoint first trains the recorded steps after it again, on the recorded episodes, and
   takes finished groups from the ledger; what was being sampled begins again. Nothing is skipped or trained twice.
5. Every hand-over is proven by probes that are asked for at once, beside what is sampled, and waited for before weights
   change again or the run ends; those to a replacement and at a resume too. Where no prompt is known yet, the first
   step's are asked. A step's metrics tell of the hand-over before it, the last step's of both.
6. Over several ranks all this is rank 0's, and what ranks do together is ordered: see `schedule_async_ranks`.
"""

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Literal

from apps.common.run.interrupts import Runner, held
from apps.grpo.config import GrpoConfig
from apps.grpo.reporting.episode_metrics import age_metrics
from apps.grpo.reporting.live import EVERY, LoadElsewhere, Show, Ticker
from apps.grpo.reporting.timeline import SamplerLane, Timeline
from apps.grpo.sampling.ray import start_generating
from apps.grpo.sampling.session import Evaluation, environment_of, hand_over
from apps.grpo.schedules.async_follower import Done, Give, Lead, TrainOn, evaluation_of
from apps.grpo.schedules.async_state import hands_over, number_of, settings_of, stands
from apps.grpo.schedules.ledger_files import ASYNC, check_ledgers
from apps.grpo.schedules.numbered_tasks import NumberedRows
from apps.grpo.schedules.pending_checks import Proofs
from apps.grpo.schedules.restarts import RESTARTS, SamplingProcess
from apps.grpo.schedules.transfer_result import Handed
from apps.grpo.step import StepResult, episode_advantages, rollout_metrics, train_on
from apps.grpo.tasks.prompt_tasks import Tasks
from apps.grpo.tasks.task_state import load_cursor, save_cursor
from engines import TrainEngine
from rollout import Episode, RolloutLedger, StalenessController
from rollout.control.staleness import (
    Begin,
    Event,
    Failed,
    Finished,
    Sync,
    Synced,
    SyncFailed,
    Train,
    Trained,
)
from rollout.episodes.codec import decode_episodes
from rollout.workers.channel import Message
from rollout.workers.process import WorkerDied
from rollout.workers.protocol import Workers


class FullyAsync:
    """See the head of this file; of rank 0. `done`: steps that the checkpoint holds which the run goes on from."""

    def __init__(
        self,
        config: GrpoConfig,
        tasks: Tasks,
        engine: TrainEngine,
        model: Path,
        run_dir: Path,
        done: int,
        runner: Runner,
        show: Show,
    ) -> None:
        self._config, self._tasks, self._engine, self._model = config, tasks, engine, model
        self._run_dir, self._runner, self._show = run_dir, runner, show
        self._settings = settings_of(config)
        self._served = config.cluster.rollout.engine == "vllm"
        check_ledgers(run_dir, "fully_async", 1, done)
        self._ledger = RolloutLedger(run_dir / ASYNC, done)
        place = load_cursor(run_dir, done) if done else None
        self._rows = NumberedRows(tasks, config.prompts, place)
        self._replay = dict(self._ledger.state.batches)
        self._controller = StalenessController(self._settings, stands(self._settings, self._ledger.state, done))
        self._lock = threading.Lock()
        self._queue: queue.Queue[Train | Sync | BaseException] = queue.Queue()
        self._closing = False
        self._lead = Lead()
        self._process = SamplingProcess(self._start, self._give, number_of(self._settings, done))
        self._begun: dict[int, Workers] = {}  # by group: who samples it
        self._timeline = Timeline(run_dir, done)
        self._sampling = SamplerLane(self._timeline)
        self._load = LoadElsewhere()
        self._ticker = Ticker(self._tell_live)
        self._proofs = Proofs(lambda: self._living(proven=False))

    def __enter__(self) -> "FullyAsync":
        begun = False
        try:
            self._process.begin()
            self._proofs.handed(self._process.version)
            self._ticker.begin()
            if not self._replay:
                self._open()
            self._lead.order(Done())
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
            self._ticker.end()
            self._ledger.close()

    def step(self, step: int) -> StepResult:
        """Wait for the groups of the step, train on them, and hand over weights where that is due."""
        result = self._step(step)
        self._lead.order(Done(result.metrics))
        return result

    def _step(self, step: int) -> StepResult:
        begun = time.perf_counter()
        if step + 1 in self._replay:
            result = self._train(Train(step + 1, self._replay.pop(step + 1), 0), begun)
            if hands_over(self._settings, step + 1):
                self._process.push(self._settings.version_of(step + 1))
                self._proofs.handed(self._process.version, result.episodes)
            if not self._replay:
                self._open()
        else:
            decision = self._next(Train)
            assert isinstance(decision, Train)
            assert decision.step == step + 1
            result = self._train(decision, begun)
            self._tell(Trained())
            if hands_over(self._settings, step + 1):
                result.metrics.update(self._synced(result.episodes))
        if step + 1 == self._settings.total_steps:
            for name, value in self._proven().items():  # beside those of the hand-over before
                result.metrics[name] = max(value, result.metrics.get(name, value))
        ended = time.perf_counter()
        result.metrics["time/step_s"] = ended - begun
        result.metrics["tokens_per_second"] = result.metrics["rollout/tokens"] / (ended - begun)
        return result

    def evaluate(self) -> Evaluation:
        """Greedy answers to the held-out tasks by the sampling process, beside what it samples."""
        begun = time.perf_counter()
        while True:
            asked = self._living().call("evaluate")
            self._lead.wait_for([asked])
            try:
                _, payload = asked.result()
                break
            except WorkerDied:
                continue
        if self._controller.done:  # no step follows whose training would wait for a proof
            self._proofs.known(decode_episodes(payload))
            self._proven()
        self._lead.order(Done(payload=payload))
        self._timeline.add("trainer", "evaluate", begun, time.perf_counter())
        return evaluation_of(self._tasks, payload)

    def saving(self, step: int) -> None:
        """From where the tasks must be asked that the checkpoint does not hold."""
        with self._lock:
            place = self._rows.place(self._oldest())
        save_cursor(self._run_dir, step, place, self._config.keep_checkpoints)

    def saved(self, step: int) -> None:
        """The ledger need not keep what the checkpoint holds."""
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
        with held(), self._lock:
            self._obey(self._controller.handle(event))

    def _obey(self, decisions: Sequence[Begin | Train | Sync]) -> None:
        """Record, then do; the caller holds the lock."""
        for decision in decisions:
            if isinstance(decision, Begin):
                self._ledger.begun(decision.group, decision.version)
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
        future.add_done_callback(lambda found: self._ended(worker, group, found))

    def _ended(self, worker: Workers, group: int, found: "Future[Message]") -> None:
        """A group is sampled, or its process died; in the thread that hears it. What one whose groups count as lost
        still answers is nobody's: another one samples them."""
        error = found.exception()
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
                self._ledger.finished(group, found.result()[1])
                self._obey(self._controller.handle(Finished(group)))
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
                found = self._queue.get(timeout=EVERY)
            except queue.Empty:
                self._lead.waits()
                continue
            if isinstance(found, WorkerDied):
                self._living()
            elif isinstance(found, BaseException):
                raise found
            else:
                assert isinstance(found, kind), f"{found} while waiting for {kind.__name__}"
                return found

    def _tell_live(self) -> None:
        with self._lock:
            state, staleness = self._controller.state, self._controller.staleness
        groups = {"queue": len(state.ready), "sampling": len(state.running), "staleness": staleness}
        self._show(groups | self._load.values(self._process.worker))

    def _train(self, decision: Train, begun: float) -> StepResult:
        """Return one step on the recorded episodes of its groups, in the order of the tasks."""
        config = self._config
        sampled = time.perf_counter()
        order = TrainOn(decision.step, [self._payload(group) for group in decision.groups])
        with self._lock:
            rows = [self._rows[group] for group in decision.groups]
            version = self._controller.version
        episodes, batch = order.batch(config)
        packed = time.perf_counter()
        self._proofs.known(episodes)
        metrics = self._proven()  # the weights are about to change
        ready = time.perf_counter()
        self._lead.order(order)
        metrics |= train_on(batch, config, self._engine)
        trained = time.perf_counter()
        self._timeline.add("trainer", "train", ready, trained)
        metrics |= rollout_metrics(episodes, lambda task: environment_of(self._tasks, task))
        metrics |= self._schedule_metrics(episodes, version, decision.staleness)
        metrics |= {
            "time/wait_for_rollout_s": sampled - begun,
            "time/wait_for_probes_s": ready - packed,
            "time/train_s": packed - sampled + trained - ready,
            "time/step_s": trained - begun,
        }
        metrics["tokens_per_second"] = metrics["rollout/tokens"] / (trained - begun)
        return StepResult(episodes, episode_advantages(batch, len(episodes)), metrics, rows)

    def _payload(self, group: int) -> bytes:
        with self._lock:
            return self._ledger.payload(group)

    def _schedule_metrics(self, episodes: Sequence[Episode], version: int, staleness: int) -> dict[str, float]:
        """Return how old the step's tokens are, and what waits behind it."""
        with self._lock:
            state = self._controller.state
        waiting = {"schedule/queue": float(len(state.ready)), "schedule/running": float(len(state.running))}
        return {"schedule/staleness": float(staleness), **age_metrics(episodes, version), **waiting}

    def _synced(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Hand over the weights as soon as the controller says so; a transfer that fails is tried again. Probes of
        them, of the step's `episodes`, are asked for before new groups begin, whose prompts they would wait behind."""
        begun, failures = time.perf_counter(), list[RuntimeError]()
        while True:
            decision = self._next(Sync)
            assert isinstance(decision, Sync)
            waited, worker = time.perf_counter(), self._living(proven=False)
            try:
                handed = self._give(worker, decision.version, decision.interrupt)
            except RuntimeError as error:
                failures.append(error)
                if len(failures) > RESTARTS:
                    raise RuntimeError(f"weights failed {len(failures)} times, at first: {failures[0]}") from error
                self._process.fail(error)
                self._living(proven=False)
                self._tell(SyncFailed())
                continue
            break
        ended = time.perf_counter()
        self._timeline.add("weights", "sync", waited, ended)
        with self._lock:
            self._sampling.held(ended - handed.times.paused_s, ended)
        self._process.version = decision.version
        self._proofs.handed(decision.version, episodes)
        self._tell(Synced())
        return {
            "weights/version": float(decision.version),
            **({"weights/bytes": float(handed.nbytes)} if self._served else handed.metrics),  # vLLM's are its own
            "time/wait_for_sync_s": waited - begun,
            "time/export_and_update_weights_s": ended - waited,
        }

    def _proven(self) -> dict[str, float]:
        """Return that every sampler took the weights it was handed last, which the engine still has; see
        `hold_samplers`."""
        return self._proofs.held(self._engine, self._lead)

    # -- the sampling process --------------------------------------------------------------------------------------

    def _start(self, version: int) -> Workers:
        """Return a process from the model that the run began with, under this number."""
        with self._lock:
            place = self._rows.place(self._oldest())
        return start_generating(self._config, self._tasks, self._model, version, place, self._lead.wait_for)

    def _give(self, worker: Workers, version: int, interrupt: bool = False) -> Handed:
        """Hand over the present weights."""
        live = not self._served  # vLLM reads a checkpoint's names
        pause: Literal["abort"] | None = "abort" if interrupt else None
        self._lead.order(Give(version, live))
        return hand_over(self._engine, worker, version, self._runner, live=live, pause=pause)

    def _living(self, proven: bool = True) -> Workers:
        """Return the process; one that died is replaced, and what it was sampling begins again. `proven`: the one in
        its place proves that it took its weights."""
        before, lost = self._process.worker, list[int]()
        worker = self._process.living(lambda: lost.extend(self._lost()))
        if proven and worker is not before:
            self._proofs.handed(self._process.version)  # before new groups begin, whose prompts it would wait behind
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

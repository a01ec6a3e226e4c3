"""Several ranks that train beside one sampling process: the first one decides, and the others obey.

1. Rank 0 alone has the process, the ledger and the controller (`FullyAsyncSchedule`). Whatever all ranks do together,
   it orders first: a broadcast of what is to be done, with all that it takes but rows. The others (`AsyncFollower`) do
   what they are told until a call of the run's loop is done, which is an order as well.
2. So all ranks train on the same groups, of which rank 0 sends each the rows that it trains (`schedules.rows.shared`),
   and export the same weights as often, also where a sampling process that died is replaced in mid-step.
3. While rank 0 waits for episodes, or for the process to begin, it says so now and then: others wait for an order, and
   a collective's timeout bounds neither.
4. A rank that fails ends all (`engines.launch`): nobody waits for an order that does not come.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from rollout import Episode
from rollout.episodes.codec import decode_episodes
from rollout.episodes.summary import AnyEpisode
from rollout.sync.transfer import WeightVoteFailed
from rollout.workers.collective import BrokenGroup
from schedules.protocols import Tasks, Trainer, TrainResult
from schedules.reporting.live import EVERY
from schedules.rows.shared import gather_episodes, train_step
from schedules.runtime.collectives import broadcast
from schedules.runtime.interrupts import Runner
from schedules.sampling.first_batch import scored_difference
from schedules.sampling.ledger_files import check_ledgers
from schedules.sampling.remote_sampler import RemoteSampler
from schedules.sampling.session import Evaluation, evaluation_of
from schedules.sampling.settings import RunState
from schedules.schedule import TrainStepResult
from schedules.weights.weight_checks import compare_checks, decode_media
from schedules.weights.weight_sync import sync_weights

QUIET_SECONDS = 10.0
"""Seconds that the other ranks hear nothing, at most, while rank 0 waits for episodes."""


@dataclass(frozen=True)
class Wait:
    """Order to wait: rank 0 waits for episodes."""


@dataclass(frozen=True)
class SendWeights:
    """Order to give the sampling process the present weights under this number (`sync_weights`)."""

    version: int
    module_names: bool


@dataclass(frozen=True)
class CheckWeights:
    """Order to compare what the samplers said with the present weights; the arguments of `compare_checks`, media as
    `encode_media` writes them."""

    prompts: Sequence[Sequence[int]]
    checks: Sequence[dict[str, Any]]
    version: int
    media: Sequence[dict[str, Any] | None] = ()

    def run(self, trainer: Trainer) -> dict[str, float]:
        """Return the metrics of `compare_checks`; collective."""
        return compare_checks(trainer, self.prompts, self.checks, self.version, decode_media(self.media))


@dataclass(frozen=True)
class TrainBatch:
    """Order to train step number `step`, from 1, on episodes that rank 0 has: their summaries come with it
    (`gather_episodes`), and rows where they are trained."""

    step: int
    scored: bool = False
    """Whether the trainer scores some of them before (`scored_difference`)."""

    def train(self, trainer: Trainer, episodes: Sequence[AnyEpisode], scored: Callable[[float], object]) -> TrainResult:
        """Do it, and tell `scored` what the trainer found before; collective."""
        if self.scored:
            scored(scored_difference(trainer, episodes))
        return train_step(trainer, self.step - 1, episodes)


def recorded_episodes(payloads: Sequence[bytes]) -> list[Episode]:
    """Return the episodes of groups, as the ledger has them in order of the tasks, numbered by their group's place."""
    return [
        replace(episode, group=place) for place, payload in enumerate(payloads) for episode in decode_episodes(payload)
    ]


@dataclass(frozen=True)
class StepDone:
    """End of what the run's loop asked for: the metrics of a step; after an evaluation rank 0 has its episodes."""

    metrics: dict[str, float] | None = None


Order = Wait | SendWeights | CheckWeights | TrainBatch | StepDone
KINDS = (Wait, SendWeights, CheckWeights, TrainBatch, StepDone)
NOTHING: Order = Wait()
"""What a rank that hears an order sends itself."""


class Leader:
    """Rank 0's side; of one rank, nothing is sent. For the thread that trains: an order is a collective."""

    def __init__(self) -> None:
        self._sent = time.monotonic()

    def order(self, order: Order) -> None:
        """Send an order to the other ranks; this one does it next."""
        broadcast(order, KINDS)
        self._sent = time.monotonic()

    def waits(self) -> None:
        """Send the others word, now and then, that episodes are still waited for."""
        if time.monotonic() - self._sent > QUIET_SECONDS:
            self.order(Wait())

    def wait_for(self, futures: "Sequence[Future[Any]]") -> None:
        """Wait until all have ended, however long it takes."""
        while wait(futures, EVERY).not_done:
            self.waits()


class AsyncFollower:
    """Fully asynchronous schedule of any rank but the first."""

    def __init__(self, tasks: Tasks, trainer: Trainer, run: RunState, runner: Runner) -> None:
        self._tasks, self._trainer, self._runner = tasks, trainer, runner
        self._trained: tuple[int, list[AnyEpisode], list[float]] = (run.done, [], [])
        check_ledgers(run.run_dir, "fully_async", 1, run.done)

    def __enter__(self) -> "AsyncFollower":
        self._follow()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: nothing runs here."""

    def step(self, step: int) -> TrainStepResult:
        """Follow rank 0's step; its tasks are rank 0's to tell of."""
        metrics = self._follow().metrics
        trained, episodes, advantages = self._trained
        assert metrics is not None
        assert trained == step + 1, f"rank 0 trained step {trained}, and this rank is at {step + 1}"
        return TrainStepResult(episodes, advantages, metrics, ())

    def evaluate(self) -> Evaluation:
        """Return what rank 0's sampling process answered."""
        self._follow()
        return evaluation_of(self._tasks, gather_episodes([]), self._tasks.held_out())

    def saving(self, step: int) -> None:
        """Do nothing: rank 0 records where the tasks are."""

    def saved(self, step: int) -> None:
        """Do nothing: rank 0 has the ledger."""

    def _follow(self) -> StepDone:
        """Do what rank 0 says until it is done."""
        while not isinstance(order := broadcast(NOTHING, KINDS), StepDone):
            if isinstance(order, SendWeights):
                with suppress(
                    WeightVoteFailed, BrokenGroup
                ):  # rank 0's process did not take them: it says how it goes on
                    sync_weights(
                        self._trainer,
                        RemoteSampler(0),
                        order.version,
                        self._runner,
                        module_names=order.module_names,
                    )
            elif isinstance(order, CheckWeights):
                order.run(self._trainer)
            elif isinstance(order, TrainBatch):
                episodes = gather_episodes([])
                result = order.train(self._trainer, episodes, lambda _: None)
                self._trained = (order.step, episodes, result.advantages)
        return order

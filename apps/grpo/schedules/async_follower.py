"""Several ranks that train beside one sampling process: the first one decides, and the others obey.

1. Rank 0 alone has the process, the ledger and the controller (`FullyAsync`). Whatever all ranks do together, it orders
   first: a broadcast of what is to be done, with all that it takes. The others (`FollowingAsync`) do what they are told
   until a call of the run's loop is done, which is an order as well.
2. So all ranks train on the recorded bytes of the same groups, and export the same weights as often, also where a
   sampling process that died is replaced in mid-step.
3. While rank 0 waits for answers, or for the process to begin, it says so now and then: others wait for an order, and
   a collective's timeout bounds neither.
4. A rank that fails ends all (`engines.launch`): nobody waits for an order that does not come.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from tensordict import TensorDict

from apps.common.run.interrupts import Runner
from apps.common.run.ranks import sent_by_rank_0
from apps.grpo.config import GrpoConfig
from apps.grpo.reporting.live import EVERY
from apps.grpo.sampling.session import Evaluation, environment_of, hand_over
from apps.grpo.sampling.vllm import Media, SamplerElsewhere, hold_samplers
from apps.grpo.schedules.ledger_files import check_ledgers
from apps.grpo.step import StepResult, advantages_of, episode_advantages, train_on
from apps.grpo.tasks.prompt_tasks import Tasks
from engines import TrainEngine
from rollout import Episode, failures, to_batch
from rollout.episodes.codec import decode_episodes
from rollout.sync.transfer import NotAgreed

SILENCE = 10.0
"""Seconds that the other ranks hear nothing, at most, while rank 0 waits for answers."""


@dataclass(frozen=True)
class Wait:
    """Rank 0 waits for answers."""


@dataclass(frozen=True)
class Give:
    """The sampling process is handed the present weights under this number, by the names of `live` (`hand_over`)."""

    version: int
    live: bool


@dataclass(frozen=True)
class Prove:
    """What the samplers told is held to the present weights; the fields are arguments of `hold_samplers`."""

    prompts: Sequence[Sequence[int]]
    told: Sequence[dict[str, Any]]
    version: int
    media: Sequence[Media] = ()

    def done(self, engine: TrainEngine) -> dict[str, float]:
        """See `hold_samplers`; collective."""
        return hold_samplers(engine, self.prompts, self.told, self.version, self.media)


@dataclass(frozen=True)
class TrainOn:
    """Step number `step`, from 1, is trained on these groups, as the ledger has them, in order of the tasks."""

    step: int
    payloads: Sequence[bytes]

    def batch(self, config: GrpoConfig) -> tuple[list[Episode], TensorDict]:
        """Return the episodes, numbered by their place in the step, and what is trained."""
        episodes = [
            replace(episode, group=place)
            for place, payload in enumerate(self.payloads)
            for episode in decode_episodes(payload)
        ]
        batch = to_batch(episodes)
        batch["advantages"] = advantages_of(batch, config, self.step - 1)
        return episodes, batch


@dataclass(frozen=True)
class Done:
    """What the run's loop asked for is done: the metrics of a step, or the bytes of held-out answers."""

    metrics: dict[str, float] | None = None
    payload: bytes = b""


Order = Wait | Give | Prove | TrainOn | Done
NOTHING: Order = Wait()
"""What a rank that hears an order says itself."""


class Lead:
    """Rank 0's side; of one rank, nothing is sent. For the thread that trains: an order is a collective."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def order(self, order: Order) -> None:
        """Have the other ranks do it; this one does it next."""
        sent_by_rank_0(order)
        self._told = time.monotonic()

    def waits(self) -> None:
        """Answers are waited for, still."""
        if time.monotonic() - self._told > SILENCE:
            self.order(Wait())

    def wait_for(self, futures: "Sequence[Future[Any]]") -> None:
        """Wait until all have ended, however long it takes."""
        while wait(futures, EVERY).not_done:
            self.waits()


class FollowingAsync:
    """The schedule of any other rank. `done`: steps that the checkpoint holds which the run goes on from."""

    def __init__(
        self, config: GrpoConfig, tasks: Tasks, engine: TrainEngine, run_dir: Path, done: int, runner: Runner
    ) -> None:
        self._config, self._tasks, self._engine, self._runner = config, tasks, engine, runner
        self._trained: tuple[int, list[Episode], list[float]] = (done, [], [])
        check_ledgers(run_dir, "fully_async", 1, done)

    def __enter__(self) -> "FollowingAsync":
        self._follow()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing runs here."""

    def step(self, step: int) -> StepResult:
        """Rank 0's step; its tasks are rank 0's to tell of."""
        metrics = self._follow().metrics
        trained, episodes, advantages = self._trained
        assert metrics is not None
        assert trained == step + 1, f"rank 0 trained step {trained}, and this rank is at {step + 1}"
        return StepResult(episodes, advantages, metrics, ())

    def evaluate(self) -> Evaluation:
        """Return what rank 0's sampling process answered."""
        return evaluation_of(self._tasks, self._follow().payload)

    def saving(self, step: int) -> None:
        """Rank 0 records where the tasks are."""

    def saved(self, step: int) -> None:
        """Rank 0 has the ledger."""

    def _follow(self) -> Done:
        """Do what rank 0 says until it is done."""
        while not isinstance(order := sent_by_rank_0(NOTHING), Done):
            if isinstance(order, Give):
                with suppress(NotAgreed):  # rank 0's process did not take them: it says how it goes on
                    hand_over(self._engine, SamplerElsewhere(0), order.version, self._runner, live=order.live)
            elif isinstance(order, Prove):
                order.done(self._engine)
            elif isinstance(order, TrainOn):
                episodes, batch = order.batch(self._config)
                train_on(batch, self._config, self._engine)
                self._trained = (order.step, episodes, episode_advantages(batch, len(episodes)))
        return order


def evaluation_of(tasks: Tasks, payload: bytes) -> Evaluation:
    """Return the held-out answers that a sampling process gave.

    Raises:
        ValueError: none of them could be scored.
    """
    episodes, rows = decode_episodes(payload), tasks.held_out()
    if all(episode.score is None for episode in episodes):
        raise ValueError(f"none of {len(rows)} held-out prompts could be scored: {next(iter(failures(episodes)))}")
    return Evaluation(rows, episodes, lambda task: environment_of(tasks, task))

"""Samplers in actors of a Ray cluster, which run a step's episodes.

1. A step's tasks are dealt to the samplers in turn, one call each; a sampler runs its groups beside its engine and
   sends back episodes. Seeds come from tasks, so that the tokens are those of a run without Ray.
2. Weights go to all samplers or to none (`rollout.sync.transfer_weights`).
3. A sampler that dies ends the pool. Another pool gets the trainer's present weights, and the tasks that it was asked
   for begin again. Weights that were trained since the lost pool got its own have the number that the next sync would
   give them, and that sync has nothing to do.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, cast

from rollout import Episode, Sampling, TaskRow
from rollout.episodes.codec import decode_episodes
from rollout.workers.process import WorkerDied
from rollout.workers.protocol import Workers
from rollout.workers.serve import Handler
from schedules.protocols import SamplerSource, Tasks, Trainer
from schedules.ray.cluster import RaySettings, begin_pool
from schedules.ray.follower import Order, broadcast_order
from schedules.runtime.interrupts import Runner
from schedules.sampling.restarts import restart
from schedules.sampling.sampler_process import sampling_handlers, wait_until_ready
from schedules.sampling.session import RolloutSession
from schedules.sampling.settings import RolloutSettings
from schedules.weights.sampler_bound import SamplerBound, read_bound
from schedules.weights.transfer_result import TransferResult
from schedules.weights.weight_checks import Media, encode_media
from schedules.weights.weight_sync import sync_weights

T = TypeVar("T")
RESTARTS = 3
"""Pools that may die one after the other before a run gives up."""


class RaySamplers:
    """A pool that plays tasks, and is replaced when it dies; of rank 0, the others follow it. To be closed.

    `version`: the number that the weights in `model` count as. The samplers begin to start when this is made:
    `wait_until_ready` waits for them, before their first use.
    """

    def __init__(
        self, ray: RaySettings, source: SamplerSource, tasks: Tasks, settings: RolloutSettings, version: int
    ) -> None:
        self._ray, self._source, self._tasks, self._settings = ray, source, tasks, settings
        self._trainer: Trainer | None = None
        self._deaths = 0
        self._ahead: TransferResult | None = None  # the next sync, which a revived pool had already
        self.version = version
        self._pool = begin_pool(ray, *self._given(version))

    def wait_until_ready(self) -> None:
        """Wait until all samplers have begun. WorkerDied: one of them could not begin; the others are closed."""
        wait_until_ready(self._pool, wait)

    def __enter__(self) -> "RaySamplers":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.close()

    async def rollout_groups(
        self,
        rows: Sequence[TaskRow],
        places: Sequence[int],
        sampling: Sampling,
        size: int,
        ended: Callable[[int], None],
    ) -> list[list[Episode]]:
        """Return a group of `size` episodes of each row, under the numbers of `places`; `heard` is told how many came
        back.

        Raises:
            WorkerDied: a sampler did; see `restart_pool`.
        """
        count = min(self._ray.workers, len(rows))

        async def part(first: int) -> list[list[Episode]]:
            request = self._pool.call(
                "sample",
                rows=rows[first::count],
                places=list(places[first::count]),
                sampling=asdict(sampling),
                size=size,
            )
            _, payload = await asyncio.wrap_future(request)
            episodes = decode_episodes(payload)
            ended(len(episodes))
            return [episodes[at : at + size] for at in range(0, len(episodes), size)]

        parts = await asyncio.gather(*map(part, range(count)), return_exceptions=True)
        for groups in parts:
            if isinstance(groups, BaseException):
                raise groups
        self._deaths = 0
        dealt = cast(list[list[list[Episode]]], parts)
        return [dealt[at % count][at // count] for at in range(len(rows))]

    async def sample_checks(self, prompts: Sequence[Sequence[int]], media: Sequence[Media]) -> list[dict[str, Any]]:
        """Return what each of the samplers answers to probes. WorkerDied: see `restart_pool`."""
        requests = self._pool.call_all("probe", prompts=prompts, media=encode_media(media))
        answers = await asyncio.gather(*map(asyncio.wrap_future, requests))
        return [head["answer"] for head, _ in answers]

    async def bounds(self) -> list[SamplerBound]:
        """Return the bound of each of the samplers. WorkerDied: see `restart_pool`."""
        answers = await asyncio.gather(*map(asyncio.wrap_future, self._pool.call_all("bound")))
        return [read_bound(head["answer"]) for head, _ in answers]

    def sync(self, trainer: Trainer, runner: Runner) -> TransferResult:
        """Give all samplers the engine's present weights as the next version; the bytes handed over."""
        self._trainer = trainer
        if self._ahead is not None:
            transfer, self._ahead = self._ahead, None
            return transfer
        self.version += 1
        try:
            return self._push(runner)
        except RuntimeError:
            if self._pool.alive:
                self.version -= 1
                raise
        return self.restart_pool(runner)

    def restart_pool(self, runner: Runner, trained: bool = False) -> TransferResult:
        """Begin another pool with the trainer's present weights; the bytes handed over. The trainer is not at work.

        `trained`: the weights are newer than those of the lost pool, and count as the next version. Before the first
        hand-over there is no trainer to ask, and the pool has the weights that it began with.

        Raises:
            WorkerDied: pool after pool has died.
            NoCapacity: the cluster has no room for another one; see `restart`.
        """
        ahead = trained and self._trainer is not None
        if ahead and self._ahead is None:
            self.version += 1
        version = self.version if self._trainer is None else self.version - 1
        lost = self._pool.why
        while True:
            self._deaths += 1
            if self._deaths > RESTARTS:
                raise WorkerDied(f"Ray's samplers died {self._deaths} times in a row: see their messages above")
            self._pool.close()
            try:
                self._pool = restart(lost, lambda: self._open(version))
                if self._trainer is None:
                    return TransferResult(0)
                transfer = self._push(runner)
            except RuntimeError as error:  # also where it dies before it has begun
                if self._pool.alive:
                    raise
                lost = self._pool.why or error
                continue
            if ahead:
                self._ahead = transfer
            return transfer

    def _push(self, runner: Runner) -> TransferResult:
        assert self._trainer is not None
        broadcast_order(Order(True, self.version))
        names = self._source.module_names
        return sync_weights(self._trainer, self._pool, self.version, runner, module_names=names)

    def _open(self, version: int) -> Workers:
        return wait_until_ready(begin_pool(self._ray, *self._given(version)), wait)

    def _given(self, version: int) -> tuple[Callable[..., Mapping[str, Handler]], tuple[Any, ...], float]:
        given = (self._source, self._tasks, self._settings, version)
        return sampling_handlers, given, self._settings.stall_seconds


@dataclass(frozen=True)
class RaySession(RolloutSession):
    """A session whose episodes are played by Ray's samplers; what breaks with one of them is played again."""

    sampler: RaySamplers  # type: ignore[assignment]  # it answers with episodes, where an engine does with tokens

    def sync(self, trainer: Trainer) -> TransferResult:
        """Give the samplers the trainer's present weights; see `RaySamplers.sync`."""
        transfer = self.sampler.sync(trainer, self.runner)
        self.check.pending = True
        broadcast_order(Order(False, self.sampler.version, transfer))
        return transfer

    def run(self, make: Callable[[], Coroutine[Any, Any, T]], trained: bool = False) -> T:
        """Return what the coroutine answers; made anew after each death. `trained`: see `RaySamplers.restart_pool`."""
        while True:
            try:
                result = self.runner.run(make())
                break
            except WorkerDied:
                self.check.pending |= self.sampler.restart_pool(self.runner, trained).nbytes > 0
        broadcast_order(Order(False, self.sampler.version))
        return result

    def sample_checks(self, prompts: Sequence[Sequence[int]], media: Sequence[Media]) -> list[dict[str, Any]]:
        """Return what each of Ray's samplers answers to probes."""
        return self.run(lambda: self.sampler.sample_checks(prompts, media))

    def own_bounds(self) -> list[SamplerBound]:
        """Return the bound of each of Ray's samplers."""
        return self.run(self.sampler.bounds)

    async def rollout_groups(
        self, rows: Sequence[TaskRow], places: Sequence[int], sampling: Sampling, size: int
    ) -> list[list[Episode]]:
        """Return a group of `size` episodes of each row, under the numbers of `places`."""
        async with self.live.step(len(rows) * size):
            self.live.count(started=len(rows) * size)
            return await self.sampler.rollout_groups(
                rows, places, sampling, size, lambda count: self.live.count(ended=count)
            )

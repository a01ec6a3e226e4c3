"""Several ranks that train beside Ray's samplers: the first one has the pool, and the others follow it.

An export of weights is collective, and only rank 0 knows when there is one: at a step's end, and whenever a pool that
died is replaced. So it tells the others before each, and when what it was asked for is done. A rank that fails ends all
(`engines.launch`): nobody waits for an order that does not come.
"""

from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from rollout.sync.transfer import TransferTimes, WeightVoteFailed
from rollout.workers.collective import BrokenGroup
from schedules.protocols import Trainer
from schedules.runtime.collectives import broadcast_result
from schedules.sampling.remote_sampler import RemoteSampler
from schedules.sampling.session import RolloutSession
from schedules.weights.sampler_bound import SamplerBound
from schedules.weights.transfer_result import TransferResult
from schedules.weights.weight_checks import Media
from schedules.weights.weight_sync import sync_weights

T = TypeVar("T")


class Order(NamedTuple):
    """Order of rank 0: a weight sync as this version begins, or all is done and this is the version."""

    begins: bool
    version: int
    transfer: TransferResult = TransferResult(0)


def broadcast_order(order: Order | None) -> Order:
    """Return rank 0's order, on every rank; collective."""
    sent = broadcast_result(order, (Order, TransferResult, TransferTimes))
    assert sent is not None
    return sent


class RayFollower(RemoteSampler):
    """Sampler of a rank whose samplers are rank 0's: the version of their weights, and the trainer that exports."""

    trainer: Trainer | None = None


@dataclass(frozen=True)
class RayFollowerSession(RolloutSession):
    """The session of such a rank: no tasks are dealt to it, and it takes part in every weight sync."""

    sampler: RayFollower  # type: ignore[assignment]  # it is asked for nothing but its version

    def sync(self, trainer: Trainer) -> TransferResult:
        """Take part in what rank 0's `sync` does."""
        self.sampler.trainer = trainer
        return self._follow()

    def run(self, make: Callable[[], Coroutine[Any, Any, T]], trained: bool = False) -> T:
        """Return what the coroutine returns, of no tasks, once rank 0's has ended."""
        del trained
        self._follow()
        return self.runner.run(make())

    def sample_checks(self, prompts: Sequence[Sequence[int]], media: Sequence[Media]) -> list[dict[str, Any]]:
        """Return nothing: rank 0 asks its samplers."""
        del prompts, media
        self._follow()
        return []

    def own_bounds(self) -> list[SamplerBound]:
        """Return nothing: rank 0 asks its samplers."""
        self._follow()
        return []

    def _follow(self) -> TransferResult:
        while (order := broadcast_order(None)).begins:
            assert self.sampler.trainer is not None
            self.check.pending = True
            with suppress(WeightVoteFailed, BrokenGroup):  # rank 0's samplers did not take them: it says how it goes on
                sync_weights(
                    self.sampler.trainer,
                    RemoteSampler(0),
                    order.version,
                    self.runner,
                    module_names=self.module_names,  # as rank 0's samplers take them
                )
        self.sampler.version = order.version
        return order.transfer

"""Several ranks that train beside Ray's samplers: the first one has the pool, and the others follow it.

An export of weights is collective, and only rank 0 knows when there is one: at a step's end, and whenever a pool that
died is replaced. So it tells the others before each, and when what it was asked for is done. A rank that fails ends all
(`engines.launch`): nobody waits for an order that does not come.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from apps.common.run.ranks import from_rank_0
from apps.grpo.sampling.session import Session, hand_over
from apps.grpo.sampling.vllm import SamplerElsewhere
from apps.grpo.schedules.transfer_result import Handed
from engines import TrainEngine
from rollout.sync.transfer import NotAgreed

T = TypeVar("T")


class Order(NamedTuple):
    """What rank 0 tells: a hand-over of weights as this version begins, or all is done and this is the version."""

    begins: bool
    version: int
    handed: Handed = Handed(0)


def told(order: Order | None) -> Order:
    """Rank 0's order, on every rank; collective."""
    found = from_rank_0(order)
    assert found is not None
    return found


class RayElsewhere(SamplerElsewhere):
    """What a rank has whose samplers are rank 0's: the version of their weights, and the engine that it exports."""

    engine: TrainEngine | None = None


@dataclass(frozen=True)
class FollowingSession(Session):
    """The session of such a rank: it is dealt no tasks, and takes part in every hand-over."""

    sampler: RayElsewhere  # type: ignore[assignment]  # it is asked for nothing but its version

    def sync(self, engine: TrainEngine) -> Handed:
        """Take part in what rank 0's `sync` does."""
        self.sampler.engine = engine
        return self._follow()

    def asked(self, make: Callable[[], Coroutine[Any, Any, T]], trained: bool = False) -> T:
        """Return what the coroutine answers, of no tasks, once rank 0's is answered."""
        del trained
        self._follow()
        return self.runner.run(make())

    def probed(
        self, prompts: Sequence[Sequence[int]], media: Sequence[Mapping[str, Any] | None]
    ) -> list[dict[str, Any]]:
        """Return nothing: rank 0 asks its samplers."""
        del prompts, media
        self._follow()
        return []

    def _follow(self) -> Handed:
        live = self.config.cluster.rollout.engine == "native"  # as rank 0's samplers take them
        while (order := told(None)).begins:
            assert self.sampler.engine is not None
            self.proof.owed = True
            with suppress(NotAgreed):  # rank 0's samplers did not take them: it says how it goes on
                hand_over(self.sampler.engine, SamplerElsewhere(0), order.version, self.runner, live=live)
        self.sampler.version = order.version
        return order.handed

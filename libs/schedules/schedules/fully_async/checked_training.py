"""Training on a step's groups, and what the first batch shows of the samplers."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from rollout import Episode
from rollout.workers.process import WorkerDied
from rollout.workers.protocol import Workers
from schedules.fully_async.follower import Leader, TrainBatch
from schedules.protocols import Trainer, TrainResult
from schedules.sampling.first_batch import FirstBatch, SamplerCheck, scored_difference
from schedules.weights.sampler_bound import SamplerBound, read_bound


class CheckedTraining:
    """Training by the order of `leader`; `alive` gives the samplers."""

    def __init__(self, trainer: Trainer, leader: Leader, alive: Callable[[], Workers]) -> None:
        self._trainer, self._leader, self._alive = trainer, leader, alive
        self._first = FirstBatch()

    def train(
        self, order: TrainBatch, episodes: Sequence[Episode], version: int | None
    ) -> tuple[TrainResult, SamplerCheck | None]:
        """Train on the order's episodes; `version`: of the samplers' weights, None where the trainer has newer ones.

        Raises:
            SamplerMismatchError: see `FirstBatch`.
        """
        scored = version is not None and self._first.begin(self._trainer, episodes, version, self._bounds)
        self._leader.order(replace(order, scored=scored))
        if scored:
            self._first.scored(scored_difference(self._trainer, episodes))
        result = self._trainer.train(order.step - 1, episodes)
        return result, None if version is None else self._first.end(order.step - 1, result)

    def _bounds(self) -> list[SamplerBound]:
        while True:
            asked = self._alive().call_all("bound")
            self._leader.wait_for(asked)
            try:
                return [read_bound(future.result()[0]["answer"]) for future in asked]
            except WorkerDied:
                continue

"""Training on a step's groups, and what the first batch shows of the samplers."""

from collections.abc import Callable, Sequence

from rollout import Episode
from rollout.episodes.summary import AnyEpisode
from rollout.workers.process import WorkerDied
from rollout.workers.protocol import Workers
from schedules.fully_async.follower import Leader, TrainBatch
from schedules.protocols import Trainer, TrainResult
from schedules.rows.shared import gather_episodes
from schedules.sampling.first_batch import FirstBatch, SamplerCheck
from schedules.weights.sampler_bound import SamplerBound, read_bound


class CheckedTraining:
    """Training by the order of `leader`; `alive` gives the samplers."""

    def __init__(self, trainer: Trainer, leader: Leader, alive: Callable[[], Workers]) -> None:
        self._trainer, self._leader, self._alive = trainer, leader, alive
        self._first = FirstBatch()

    def train(
        self, step: int, mine: Sequence[Episode], version: int | None
    ) -> tuple[list[AnyEpisode], TrainResult, SamplerCheck | None]:
        """Train step number `step`, from 1, on these episodes, and return them as all ranks know them; `version`: of
        the samplers' weights, None where the trainer has newer ones.

        Raises:
            SamplerMismatchError: see `FirstBatch`.
        """
        scored = version is not None and self._first.begin(self._trainer, mine, version, self._bounds)
        order = TrainBatch(step, scored)
        self._leader.order(order)
        episodes = gather_episodes(mine)
        result = order.train(self._trainer, episodes, self._first.scored)
        return episodes, result, None if version is None else self._first.end(step - 1, result)

    def _bounds(self) -> list[SamplerBound]:
        while True:
            asked = self._alive().call_all("bound")
            self._leader.wait_for(asked)
            try:
                return [read_bound(future.result()[0]["answer"]) for future in asked]
            except WorkerDied:
                continue

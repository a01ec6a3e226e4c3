"""Weight checks that are asked for at once and looked at before the next update."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from rollout import Episode
from rollout.episodes.summary import AnyEpisode
from rollout.workers.channel import Message
from rollout.workers.process import WorkerDied
from rollout.workers.protocol import Workers
from schedules.fully_async.follower import CheckWeights, Leader
from schedules.protocols import Trainer
from schedules.rows.shared import held_here
from schedules.weights.weight_checks import check_prompts, encode_media


class WeightCheck:
    """Some of a step's prompts, sampled again by every sampler right after it was given weights as number `version`.

    The responses stand in line with whatever else is sampled, so that waiting for them would have the trainer idle;
    `metrics` waits and compares. `alive` gives the samplers: those in place of dead ones have the same weights and are
    asked again.
    """

    def __init__(self, episodes: Sequence[Episode], version: int, alive: Callable[[], Workers]) -> None:
        self._prompts, self._media = check_prompts(episodes)
        self._version, self._alive = version, alive
        self._requests = self._request()

    def metrics(self, trainer: Trainer, leader: Leader) -> dict[str, float]:
        """Return how far the responses are from the trainer's weights, which are still those of `version`; collective,
        by the order of `leader`.

        Raises:
            WeightsNotTakenError: further than the samplers' arithmetic explains.
        """
        while True:
            leader.wait_for(self._requests)
            try:
                checks = [future.result()[0]["answer"] for future in self._requests]
            except WorkerDied:
                self._requests = self._request()
                continue
            order = CheckWeights(self._prompts, checks, self._version, encode_media(self._media))
            leader.order(order)
            return order.run(trainer)

    def _request(self) -> "list[Future[Message]]":
        if not self._prompts:
            return []
        return self._alive().call_all("probe", prompts=self._prompts, media=encode_media(self._media))


class PendingChecks:
    """Weights of the trainer that are still to be checked, as they were synced last.

    Every sync is noted by `synced`, those to samplers in place of dead ones too, and one at a resume. Where no step's
    prompts are known by then, the first ones that are told serve (`known`). `run` comes before the trainer's weights
    change. `alive`: as for `WeightCheck`.
    """

    def __init__(self, alive: Callable[[], Workers]) -> None:
        self._alive = alive
        self._episodes: Sequence[Episode] = ()
        self._check: WeightCheck | None = None
        self._version: int | None = None

    def synced(self, version: int, episodes: Sequence[AnyEpisode] = ()) -> None:
        """Note that all samplers have just been given the trainer's weights as `version`; `episodes`: those of the last
        step, where they are not the same as before. Number 0 is of no sync: samplers begin with it."""
        self._episodes = held_here(episodes) or self._episodes
        self._check, self._version = None, version or None
        self._request()

    def known(self, episodes: Sequence[AnyEpisode]) -> None:
        """Note episodes whose prompts may be sampled again, where a check waits for some."""
        self._episodes = held_here(episodes)
        self._request()

    def run(self, trainer: Trainer, leader: Leader) -> dict[str, float]:
        """Return the metrics of the check; nothing where nothing is to be checked. See `WeightCheck.metrics`."""
        check, self._check = self._check, None
        return {} if check is None else check.metrics(trainer, leader)

    def _request(self) -> None:
        if self._version is not None and self._episodes:
            version, self._version = self._version, None
            self._check = WeightCheck(self._episodes, version, self._alive)

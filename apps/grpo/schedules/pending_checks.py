"""Proof that samplers took the weights they were handed, asked for at once and looked at before the next update."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from apps.grpo.sampling.vllm import plain_shown, probes_media, probes_of
from apps.grpo.schedules.async_follower import Lead, Prove
from engines import TrainEngine
from rollout import Episode
from rollout.workers.channel import Message
from rollout.workers.process import WorkerDied
from rollout.workers.protocol import Workers


class Probes:
    """Some of a step's prompts, asked again of every sampler right after it was handed weights as number `version`.

    The answers stand in line with whatever else is sampled, so that waiting for them would have the trainer idle;
    `held` waits and compares. `living` gives the samplers: those in place of dead ones have the same weights and are
    asked again.
    """

    def __init__(self, episodes: Sequence[Episode], version: int, living: Callable[[], Workers]) -> None:
        self._prompts, self._media = probes_of(episodes), probes_media(episodes)
        self._version, self._living = version, living
        self._asked = self._ask()

    def held(self, engine: TrainEngine, lead: Lead) -> dict[str, float]:
        """Return metrics of how far the answers are from the engine's weights, which are still those of `version`;
        collective, by the order of `lead`.

        Raises:
            WeightsNotTakenError: further than the samplers' arithmetic explains.
        """
        while True:
            lead.wait_for(self._asked)
            try:
                told = [future.result()[0]["answer"] for future in self._asked]
            except WorkerDied:
                self._asked = self._ask()
                continue
            proof = Prove(self._prompts, told, self._version, self._media)
            lead.order(proof)
            return proof.done(engine)

    def _ask(self) -> "list[Future[Message]]":
        if not self._prompts:
            return []
        return self._living().call_all("probe", prompts=self._prompts, media=plain_shown(self._media))


class Proofs:
    """What is still to be proven: the weights of the engine, as they were handed over last.

    Every hand-over is noted by `handed`, those to samplers in place of dead ones too, and one at a resume. Where no
    step's prompts are known by then, the first ones that are told serve (`known`). `held` comes before the engine's
    weights change. `living`: as for `Probes`.
    """

    def __init__(self, living: Callable[[], Workers]) -> None:
        self._living = living
        self._episodes: Sequence[Episode] = ()
        self._asked: Probes | None = None
        self._owed: int | None = None

    def handed(self, version: int, episodes: Sequence[Episode] = ()) -> None:
        """All samplers have just been handed the engine's weights as `version`; `episodes`: those of the last step,
        where they are not the same as before. Number 0 is of no hand-over: samplers begin with it."""
        self._episodes = episodes or self._episodes
        self._asked, self._owed = None, version or None
        self._ask()

    def known(self, episodes: Sequence[Episode]) -> None:
        """Episodes whose prompts may be asked again, where something waits for some."""
        self._episodes = episodes
        self._ask()

    def held(self, engine: TrainEngine, lead: Lead) -> dict[str, float]:
        """See `Probes.held`; nothing where nothing is to be proven."""
        asked, self._asked = self._asked, None
        return {} if asked is None else asked.held(engine, lead)

    def _ask(self) -> None:
        if self._owed is not None and self._episodes:
            version, self._owed = self._owed, None
            self._asked = Probes(self._episodes, version, self._living)

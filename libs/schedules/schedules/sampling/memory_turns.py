"""Training and sampling take turns with the memory of a device that they share."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from rollout import Episode
from schedules.protocols import OffloadingTrainer, SleepingEngine, Trainer
from schedules.runtime.collectives import all_agree, gather_lists
from schedules.sampling.first_batch import scored_difference
from schedules.sampling.session import RolloutSession
from schedules.weights.weight_checks import check_media_of, check_prompts_of, compare_checks


@contextmanager
def sampling_memory(session: RolloutSession, trainer: Trainer) -> Iterator[None]:
    """Sample while this is open, as the settings say who gives memory back meanwhile; collective.

    With `sleep` the sampler is awake only here: it takes its memory once every rank has left its own, whose devices it
    may span, and no rank takes that again before every sampler sleeps.
    """
    settings = session.settings
    if settings.offload and not isinstance(trainer, OffloadingTrainer):
        raise ValueError("offload needs a trainer with offloaded(): leave it out, or add that method")
    with trainer.offloaded() if settings.offload and isinstance(trainer, OffloadingTrainer) else nullcontext():
        if not settings.sleep:
            yield
            return
        sleeping = session.sampler if isinstance(session.sampler, SleepingEngine) else None
        torch.cuda.empty_cache()  # what torch keeps of a step, most of a device, is no other process's to take
        all_agree(True)
        if sleeping is not None:
            session.runner.run(sleeping.wake())
        yield
        if sleeping is not None:
            session.runner.run(sleeping.sleep())
        all_agree(True)


def check_weights(session: RolloutSession, trainer: Trainer, episodes: Sequence[Episode]) -> dict[str, float]:
    """Sample some of the step's prompts again and compare the log-probs of the responses with the trainer's.

    Every sampler of every rank is asked, and its responses are scored by all of them; collective. The native one in a
    rank's own process needs no check. The metrics say how far apart they are, and what the weight sync cost.

    Raises:
        WeightsNotTakenError: they are further apart than the sampler's arithmetic explains.
    """
    prompts, media = check_prompts_of(episodes), check_media_of(episodes)
    if not prompts:
        return {}
    session.check.pending = False
    with sampling_memory(session, trainer) if session.settings.sleep else nullcontext():
        checks = session.sample_checks(prompts, media)
    return compare_checks(trainer, prompts, gather_lists(checks), session.sampler.version, media)


def begin_first_batch(session: RolloutSession, trainer: Trainer, episodes: Sequence[Episode]) -> None:
    """Begin the check of the sampler by these episodes, about to be trained on, where they serve (`FirstBatch`);
    collective. Nothing is sampled meanwhile."""
    if session.first.begin(trainer, episodes, session.sampler.version, session.bounds):
        session.first.scored(scored_difference(trainer, episodes))


def run_pending_checks(session: RolloutSession, trainer: Trainer, episodes: Sequence[Episode]) -> None:
    """Check weights that were synced outside a step: at a resume, or to samplers in place of dead ones. Before the
    trainer's weights change, by what was sampled first; collective. WeightsNotTakenError: see `check_weights`."""
    while session.check.pending and check_prompts_of(episodes):  # again, of samplers that died of it
        check_weights(session, trainer, episodes)

"""Training and sampling take turns with the memory of a device that they share."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from rollout.episodes.summary import AnyEpisode
from schedules.protocols import OffloadingTrainer, SleepingEngine, Trainer
from schedules.runtime.collectives import all_agree, gather_lists
from schedules.sampling.first_batch import scored_difference
from schedules.sampling.session import RolloutSession
from schedules.weights.weight_checks import Media, check_prompts, compare_checks, has_check_prompts


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


@dataclass(frozen=True)
class CheckSamples:
    """Responses of a sampler to prompts of a step, for a weight check: one dictionary a sampler of this rank."""

    prompts: list[list[int]]
    media: list[Media]
    checks: list[dict[str, Any]]


def sample_check(session: RolloutSession, episodes: Sequence[AnyEpisode]) -> CheckSamples | None:
    """Return responses to some prompts of these episodes, of a sampler that is awake; None where there is no prompt.
    Collective."""
    if not has_check_prompts(episodes):
        return None
    prompts, media = check_prompts(episodes)
    session.check.pending = False
    return CheckSamples(prompts, media, session.sample_checks(prompts, media))


def compare_check(session: RolloutSession, trainer: Trainer, samples: CheckSamples | None) -> dict[str, float]:
    """Return how far the responses of all ranks are from the trainer's present weights; collective.

    Raises:
        WeightsNotTakenError: see `check_weights`.
    """
    if samples is None:
        return {}
    every = gather_lists(samples.checks)
    return compare_checks(trainer, samples.prompts, every, session.sampler.version, samples.media)


def check_weights(session: RolloutSession, trainer: Trainer, episodes: Sequence[AnyEpisode]) -> dict[str, float]:
    """Sample some of the step's prompts again and compare the log-probs of the responses with the trainer's.

    Every sampler of every rank is asked, and its responses are scored by all of them; collective. The native one in a
    rank's own process needs no check. The metrics say how far apart they are, and what the weight sync cost.

    Raises:
        WeightsNotTakenError: they are further apart than the sampler's arithmetic explains.
    """
    if not has_check_prompts(episodes):
        return {}
    with sampling_memory(session, trainer) if session.settings.sleep else nullcontext():
        samples = sample_check(session, episodes)
    return compare_check(session, trainer, samples)


def begin_first_batch(session: RolloutSession, trainer: Trainer, episodes: Sequence[AnyEpisode]) -> None:
    """Begin the check of the sampler by these episodes, about to be trained on, where they serve (`FirstBatch`);
    collective. Nothing is sampled meanwhile."""
    if session.first.begin(trainer, episodes, session.sampler.version, session.bounds):
        session.first.scored(scored_difference(trainer, episodes))


def run_pending_checks(session: RolloutSession, trainer: Trainer, episodes: Sequence[AnyEpisode]) -> None:
    """Check weights that were synced outside a step: at a resume, or to samplers in place of dead ones. Before the
    trainer's weights change, by what was sampled first; collective. WeightsNotTakenError: see `check_weights`."""
    while session.check.pending and has_check_prompts(episodes):  # again, of samplers that died of it
        check_weights(session, trainer, episodes)

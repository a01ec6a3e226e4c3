"""The proof of each rank's sampler, by all ranks together."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch

from apps.grpo.config import GrpoConfig
from apps.grpo.sampling.source import rollout_settings
from apps.grpo.step import GrpoTrainer
from engines import EngineConfig, build_engine
from engines.launch import launch
from engines.tiny import tiny_model
from rollout import Completion, Episode, NativeEngine, Sampling, Score, Segment
from schedules.runtime.collectives import gather_lists, rank_and_world
from schedules.sampling.memory_turns import check_weights
from schedules.sampling.session import PendingCheck
from schedules.weights.sampler_bound import sampler_bound
from schedules.weights.weight_checks import WeightsNotTakenError, encode_completion

PROMPTS = [[5, 9, 2], [7, 1, 1, 30], [3], [8, 8]]


def told(module: Any, how: Sampling) -> dict[str, Any]:
    """What a sampler over the module tells of itself."""
    sampler = NativeEngine(module, pad_token_id=0, version=3)

    async def ask() -> list[Completion]:
        return await asyncio.gather(*(sampler.generate(prompt, how) for prompt in PROMPTS))

    bound = asdict(sampler_bound("float32"))
    return {"answers": [encode_completion(answer) for answer in asyncio.run(ask())], "bound": bound, "metrics": {}}


def prove_on_a_rank(scales: tuple[float, ...]) -> list[Any]:
    """On each rank a sampler of its own, with weights scaled so; their answers differ in length. What came of it."""
    engine: Any = build_engine(EngineConfig(device="cpu", max_tokens_per_rank=64), tiny_model("dense", scale=2.0))
    rank, module = rank_and_world()[0], tiny_model("dense", scale=2.0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(scales[rank])
    answers = told(module, Sampling(max_new_tokens=6 - 3 * rank, seed=rank))
    sampler = SimpleNamespace(version=3)
    session: Any = SimpleNamespace(
        settings=rollout_settings(GrpoConfig()),
        sampler=sampler,
        sample_checks=lambda prompts, media: [answers],
        check=PendingCheck(),
    )
    episodes: Any = [
        Episode(f"{i}/0/1", str(i), 1, (segment_of(prompt),), Score(0.0), "done", group=i)
        for i, prompt in enumerate(PROMPTS)
    ]
    try:
        return gather_lists([check_weights(session, GrpoTrainer(GrpoConfig(), engine), episodes)["weights/check/abs"]])
    except WeightsNotTakenError as error:
        return gather_lists([str(error)])


def segment_of(prompt: Sequence[int]) -> Segment:
    return Segment(
        (*prompt, 1), (*(False for _ in prompt), True), (0.0,) * (len(prompt) + 1), (-1,) * len(prompt) + (3,)
    )


def test_every_rank_proves_the_samplers_of_all() -> None:
    """Ranks agree on what they score, and all of them stop where one's sampler has other weights."""
    good = launch(prove_on_a_rank, ((1.0, 1.0),), 2, "cpu", 1)
    assert len(good) == 2
    assert good[0] == good[1] < 1e-5
    stopped = launch(prove_on_a_rank, ((1.0, 1.1),), 2, "cpu", 1)
    assert ["log-probs of sampler 1 of 2" in text for text in stopped] == [True, True]

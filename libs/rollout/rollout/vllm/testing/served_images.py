"""What tests of images ask of vLLM, and how far its log-probs may be from those of the stock module."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from rollout.engine import Completion, RolloutEngine, Sampling
from rollout.testing.vision_model import Prompt, shown, vision_distances
from rollout.vllm.testing.served import ANSWER, MEAN, MOST

GREEDY = Sampling(max_new_tokens=8, greedy=True)
SEEN = [shown(i, *grids) for i, grids in enumerate([[(1, 4, 6)], [(1, 2, 2), (1, 6, 2), (1, 4, 4)], [(1, 8, 8)]])]
TEXT: Prompt = ([5, 60, 70, 80, 90], {})
PROMPTS = [*SEEN, TEXT, shown(9, (1, 4, 2), before=shown(8, (1, 2, 6)))]


def ask(engine: RolloutEngine, prompts: Sequence[Prompt] = PROMPTS, sampling: Sampling = ANSWER) -> list[Completion]:
    """Sample all prompts at once, each with a seed of its own."""

    async def all_of_them() -> list[Completion]:
        return await asyncio.gather(
            *[
                engine.generate(ids, sampling if sampling.greedy else replace(sampling, seed=i), media or None)
                for i, (ids, media) in enumerate(prompts)
            ]
        )

    return asyncio.run(all_of_them())


def assert_images_agree(model: PreTrainedModel, prompts: Sequence[Prompt], done: Sequence[Completion]) -> None:
    """Assert that completions have the log-probs of the stock module."""
    distance = vision_distances(model, prompts, done)
    assert distance.mean() < MEAN
    assert distance.max() < MOST


def other_images(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts with their pictures negated."""
    return [(ids, {**media, "pixel_values": -media["pixel_values"]}) for ids, media in prompts]

"""Prompts read in parts and prompts that are kept, seen by what others get meanwhile: a token of each step.

Steps are counted, not seconds: while a long prompt is read in parts, a request beside it gets a token with each.
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout.config import RolloutConfig
from rollout.engine import Completion, Sampling
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.served import ANSWER, assert_agrees, config, served

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)
PART = 600
"""Tokens of a step: more than the block of a kept prompt, fewer than half of a long one."""
LONG = [5 + i % 200 for i in range(1400)]
BESIDE = Sampling(max_new_tokens=20)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    served().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def parted(directory: Path) -> Iterator[VllmEngine]:
    """An engine that reads in parts, and keeps prompts."""
    with VllmEngine(directory, engine_config(split_prompts=True, prefix_cache=True, drop_seeds=True)) as engine:
        yield engine


def engine_config(**own: Any) -> RolloutConfig:
    return replace(config(**own), prefill_tokens=PART)


def steps_to_read(engine: VllmEngine, prompt: Sequence[int]) -> tuple[int, Completion]:
    """How many tokens a short request has, which begins in the same step, when the first of the answer comes; and the
    answer."""

    async def run() -> tuple[int, Completion]:
        got, seen = list[int](), list[int]()
        beside = engine.generate([7, 8, 9], BESIDE, on_tokens=lambda ids, _: got.extend(ids))
        read = engine.generate(prompt, ANSWER, on_tokens=lambda *_: seen.append(len(got)))
        _, answer = await asyncio.gather(beside, read)
        return seen[0], answer

    return asyncio.run(run())


def test_others_get_on_while_a_prompt_is_read_in_parts_and_a_kept_one_is_not_read_again(parted: VllmEngine) -> None:
    prompt = [*LONG, 11]
    first, answer = steps_to_read(parted, prompt)
    again, _ = steps_to_read(parted, prompt)
    other, _ = steps_to_read(parted, [3, *prompt[1:]])  # another beginning: nothing of it is kept
    assert first == other > len(prompt) // PART
    assert again < first
    assert_agrees(served(), [prompt], [answer])


def test_a_last_part_of_one_token_is_read(parted: VllmEngine) -> None:
    prompts = [[4 + i, *LONG[: 2 * PART]] for i in range(2)]
    answers = [asyncio.run(parted.generate(prompt, ANSWER)) for prompt in prompts]
    assert_agrees(served(), prompts, answers)


def test_a_seed_is_left_out_where_that_is_asked(parted: VllmEngine) -> None:
    answer = asyncio.run(parted.generate([7, 8, 9], replace(ANSWER, seed=1)))
    assert_agrees(served(), [[7, 8, 9]], [answer])


def test_without_it_a_prompt_is_read_in_a_step(directory: Path) -> None:
    with VllmEngine(directory, engine_config()) as engine:
        steps, _ = steps_to_read(engine, [*LONG, 11])
    assert steps == 1


@pytest.mark.parametrize(
    ("own", "says"),
    [({"memory_share": 0.5}, "memory_share is of an accelerator's"), ({"graph_sizes": (1, 2)}, "of CUDA graphs")],
)
def test_settings_of_an_accelerator_are_refused_on_a_cpu(directory: Path, own: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        VllmEngine(directory, config(**own))

"""Mixtures in vLLM: their log-probs are the module's, and the experts told are those they were computed with."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine import Completion, Sampling
from rollout.experts import ROUTED_EXPERTS
from rollout.testing.model import SERVED, tiny_mixture
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.served import ANSWER, PROMPTS, assert_agrees, config, sample, served
from rollout.vllm.weights.shared_weights import checkpoint_pieces

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)
VOCAB = 300


def mixture(seed: int = 0) -> PreTrainedModel:
    """Delta nets that remember for a while, and experts that matter: in a wrong order they move log-probs by units."""
    model = tiny_mixture(VOCAB, layers=4, seed=seed, **SERVED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-2)
            if ".experts." in name:
                parameter.mul_(0.4)
    return model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    mixture().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[VllmEngine]:
    with VllmEngine(directory, config(routed_experts=True)) as engine:
        yield engine


@torch.no_grad()
def share(model: PreTrainedModel, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> float:
    """Of the tokens' choices that are the module's in float32, and the tables, last tokens apart."""
    same = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = [*prompt, *completion.ids]
        logits = model(input_ids=torch.tensor([ids]), use_cache=False, output_router_logits=True).router_logits
        chosen = torch.stack([layer.topk(2).indices.sort(-1).values for layer in logits], dim=1)
        table = completion.extras[ROUTED_EXPERTS].tensor()
        assert table.shape == (len(ids), 4, 2)
        assert bool((table[-1] == -1).all())
        assert bool((table[:-1] >= 0).all())
        same.append((table[:-1].long().sort(-1).values == chosen[:-1]).all(-1).flatten().float())
    return torch.cat(same).mean().item()


def test_the_experts_told_are_those_of_its_log_probs(engine: VllmEngine) -> None:
    done = sample(engine, PROMPTS)
    assert_agrees(mixture(), PROMPTS, done)
    assert share(mixture(), PROMPTS, done) > 0.95
    turned = [list(reversed(prompt)) for prompt in PROMPTS]
    assert share(mixture(), turned, done) < 0.8  # the measure can tell


def test_a_request_that_ends_early_tells_what_it_read(engine: VllmEngine) -> None:
    (one,) = sample(engine, PROMPTS[:1], Sampling(max_new_tokens=1))
    assert share(mixture(), PROMPTS[:1], [one]) > 0.9

    async def ask() -> list[Completion]:
        begun = asyncio.Event()
        long = Sampling(max_new_tokens=400, seed=1)
        asked = [
            asyncio.create_task(engine.generate(p, long, request_id=str(i), on_tokens=lambda *_: begun.set()))
            for i, p in enumerate(PROMPTS[:3])
        ]
        await begun.wait()
        await engine.cancel("1")
        cut = await asked[1]
        await engine.cancel("0")
        await engine.cancel("2")
        return [await asked[0], cut, await asked[2]]

    done = asyncio.run(ask())
    assert share(mixture(), PROMPTS[:3], done) > 0.95


def test_after_new_weights_experts_and_routers_are_the_new_ones(engine: VllmEngine, tmp_path: Path) -> None:
    """A trap: vLLM brings experts into its kernel's order when it starts, and not when they are replaced."""
    new = mixture(seed=3)
    new.save_pretrained(tmp_path)
    asyncio.run(engine.update_weights(engine.version + 1, checkpoint_pieces(tmp_path)))
    done = sample(engine, PROMPTS)
    assert_agrees(new, PROMPTS, done)
    assert share(new, PROMPTS, done) > 0.95
    assert share(mixture(), PROMPTS, done) < 0.8


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    served().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the model has no experts"):
        VllmEngine(tmp_path, config(routed_experts=True))


def test_an_engine_that_is_not_asked_tells_nothing(directory: Path) -> None:
    with VllmEngine(directory, config()) as quiet:
        assert not sample(quiet, PROMPTS[:1], ANSWER)[0].extras


def test_the_experts_told_are_those_of_its_log_probs_where_copies_share_them(directory: Path) -> None:
    """One copy has fewer requests, and steps of nobody's tokens between them."""
    with VllmEngine(
        directory, config(routed_experts=True, data_parallel=2, expert_parallel=True, experts_over_copies=True)
    ) as engine:

        async def ask() -> list[Completion]:
            asked = [engine.generate(prompt, ANSWER, copy=int(i > 2)) for i, prompt in enumerate(PROMPTS)]
            return [*await asyncio.gather(*asked), await engine.generate(PROMPTS[0], ANSWER, copy=0)]

        done = asyncio.run(ask())
    prompts = [*PROMPTS, PROMPTS[0]]
    assert_agrees(mixture(), prompts, done)
    assert share(mixture(), prompts, done) > 0.95

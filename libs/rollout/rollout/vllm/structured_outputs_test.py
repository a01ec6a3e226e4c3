"""Structured outputs in vLLM on a CPU: log-probs of what the grammar leaves, by enumeration of the vocabulary."""

import asyncio
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from rollout.config import RolloutConfig
from rollout.engine import Completion, Sampling
from rollout.native.engine import NativeEngine
from rollout.partial_rollout import ResumableEngine
from rollout.structured_outputs import StructuredOutputs
from rollout.testing.grammars import (
    END,
    KINDS,
    VOCAB,
    forced_differences,
    letters,
    matching,
    sampling_of,
    text_of,
)  # fmt: skip
from rollout.testing.pieces import pieces_of
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.served import config, sample

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)
PROMPTS = [[1, 2, 3, 4 + i] for i in range(16)]
BOUND = 1e-3


def built(seed: int = 0) -> PreTrainedModel:
    """A dense model in float32, whose log-probs vLLM has to rounding."""
    torch.manual_seed(seed)
    sizes = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    model: PreTrainedModel = AutoModelForCausalLM.from_config(sizes, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("proj.weight", "embed_tokens.weight", "lm_head.weight")):
                parameter.normal_(0, 0.15)
    return model.eval()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RolloutConfig]:
    folder = tmp_path_factory.mktemp("model")
    built().save_pretrained(folder)
    letters().save_pretrained(folder)
    return folder, replace(config(dtype="float32"), tokenizer=folder)


@pytest.fixture(scope="module")
def engine(settings: tuple[Path, RolloutConfig]) -> Iterator[VllmEngine]:
    with VllmEngine(*settings) as engine:
        yield engine


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{}, {"temperature": 1.5, "min_p": 0.02}, {"greedy": True}])
def test_log_probs_are_of_what_the_grammar_leaves(engine: VllmEngine, kind: str, changes: dict[str, float]) -> None:
    model, (wanted, may) = built(), KINDS[kind]
    s = sampling_of(wanted, **changes)
    if s.greedy:
        done = [asyncio.run(engine.generate(PROMPTS[0], s))]
    else:
        done = sample(engine, PROMPTS, s)
    for prompt, answer in zip(PROMPTS, done, strict=False):
        assert max(forced_differences(model, prompt, answer, may, s)) < BOUND
    if not s.greedy:
        assert sum(answer.stop_reason == "stop" for answer in done) > 1


def test_greedy_answers_are_those_of_the_native_engine(engine: VllmEngine) -> None:
    native = NativeEngine(built(), tokenizer=letters())
    for wanted, _ in KINDS.values():
        s = sampling_of(wanted, greedy=True)
        one, other = asyncio.run(engine.generate(PROMPTS[3], s)), native.generate_batch([PROMPTS[3]], s)[0]
        assert one.ids == other.ids
        assert one.log_probs == pytest.approx(other.log_probs, abs=BOUND)


def test_rows_beside_are_not_masked(engine: VllmEngine) -> None:
    plain, guided = Sampling(max_new_tokens=16), sampling_of(KINDS["json"][0])

    async def ask() -> list[Completion]:
        settings = [replace(s, seed=i) for i, p in enumerate(PROMPTS) for s in (plain, guided)]
        prompts = [p for p in PROMPTS for _ in range(2)]
        return await asyncio.gather(*[engine.generate(p, s) for p, s in zip(prompts, settings, strict=True)])

    alone = sample(engine, PROMPTS, plain)
    for one, beside in zip(alone, asyncio.run(ask())[::2], strict=True):
        assert one.ids == beside.ids
        assert one.log_probs == pytest.approx(beside.log_probs, abs=BOUND)


def test_partial_rollouts_go_on_within_the_grammar(settings: tuple[Path, RolloutConfig]) -> None:
    pattern = "(ab|12|xyz){60,80}"
    heard: list[int] = []

    async def play(engine: VllmEngine) -> list[Completion]:
        resumable = ResumableEngine(engine)
        s = sampling_of(StructuredOutputs(regex=pattern), max_new_tokens=400)
        jobs = [
            asyncio.create_task(resumable.generate(p, replace(s, seed=i), on_tokens=lambda ids, _: heard.extend(ids)))
            for i, p in enumerate(PROMPTS[:6])
        ]
        while len(heard) < 60:
            assert not any(job.done() for job in jobs)
            await asyncio.sleep(0.001)
        await resumable.pause("abort")
        await resumable.update_weights(1, pieces_of(built(1).named_parameters()))
        await resumable.resume()
        return await asyncio.gather(*jobs)

    with VllmEngine(*settings) as engine:
        done = asyncio.run(play(engine))
    assert any(set(answer.policy_versions) == {0, 1} for answer in done)
    for prompt, answer in zip(PROMPTS, done, strict=False):
        assert answer.stop_reason == "stop"
        assert re.fullmatch(pattern, text_of(answer.ids[:-1]))
        new = answer.policy_versions.index(1) if 1 in answer.policy_versions else len(answer.ids)
        assert max([0.0, *forced_differences(built(1), prompt, answer, matching(pattern), Sampling(), new)]) < BOUND


def test_what_cannot_be_had_is_refused_with_its_fix(engine: VllmEngine) -> None:
    fine = sampling_of(StructuredOutputs(regex="a+"))
    refused = [
        (replace(fine, stop_token_ids=()), f"add {END} to stop_token_ids"),
        (replace(fine, stop_token_ids=(END, 3)), "stop_token_ids 3 are texts"),
        (replace(fine, structured_outputs=StructuredOutputs(regex="(a")), "unclosed group"),
        (replace(fine, structured_outputs=StructuredOutputs(json=json.dumps({"not": {}}))), "Unimplemented"),
        (replace(fine, structured_outputs=StructuredOutputs(regex="x+", num_read=2)), "last 2 tokens"),
    ]
    for sampling, words in refused:
        with pytest.raises(ValueError, match=words):
            asyncio.run(engine.generate(PROMPTS[0], sampling))
    assert engine.supports("structured_outputs")
    done = asyncio.run(engine.generate(PROMPTS[0], fine))  # the refused ones left nothing behind
    assert set(done.ids) <= {0, END} | {i for i in range(VOCAB) if text_of([min(i, END - 1)]) == "a"}

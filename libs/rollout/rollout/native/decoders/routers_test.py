"""Routed experts: what a completion tells is what the module's routers choose, one whole sequence at a time."""

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from rollout.build import build_rollout
from rollout.chat.segment import Stream
from rollout.config import OnCommit, RolloutConfig
from rollout.engine import Completion, Sampling
from rollout.environments.environment import Score
from rollout.episodes.batch import to_batch
from rollout.episodes.codec import decode_episodes, encode_episodes
from rollout.episodes.episode import Episode
from rollout.experts import ROUTED_EXPERTS
from rollout.native.engine import NativeEngine
from rollout.partial_rollout import ResumableEngine
from rollout.testing.model import tiny_mixture, tiny_model
from rollout.testing.pieces import pieces_of
from seqpack.batches.jagged import samples_of

SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 16,
    "full_attention_interval": 2,
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, mlp_only_layers=[])),
    "qwen3_moe with a dense layer": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**{**SMALL, "num_hidden_layers": 3}, mlp_only_layers=[1])
    ),
    "qwen3_next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**SMALL, **DELTA)),
    "qwen3_5_moe": tiny_mixture,
}
PROMPTS = [[3, 4, 5, 6], [7, 8], [3, 4, 5, 6], [9, 10, 11, 12, 13, 14, 15], [16] * 11]
LIMITS = (6, 1, 9, 4, 12)
MIXTURE = tiny_mixture()


def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    return model


@torch.no_grad()
def choice(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """i64[tokens, layers, k]: the likeliest experts by the logits that transformers tells, in ascending order."""
    found = model(input_ids=torch.tensor([ids]), use_cache=False, output_router_logits=True).router_logits
    return torch.stack([layer.topk(model.config.num_experts_per_tok).indices.sort(-1).values for layer in found], 1)


def told(completion: Completion) -> torch.Tensor:
    found: torch.Tensor = completion.extras[ROUTED_EXPERTS].tensor().long().sort(-1).values
    return found


def assert_own(model: PreTrainedModel, prompt: Sequence[int], completion: Completion, until: object = None) -> None:
    """All tokens that were read went where a pass over the whole sequence sends them; the last was not read."""
    found = told(completion)
    assert len(found) == len(prompt) + len(completion.ids)
    end = len(found) - 1
    assert torch.equal(found[:end], choice(model, [*prompt, *completion.ids])[:end])
    assert bool((found[end:] == -1).all())


def settings(limits: Sequence[int] = LIMITS) -> list[Sampling]:
    return [Sampling(max_new_tokens=n, seed=i) for i, n in enumerate(limits)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_told_are_the_modules_own_choice(family: str) -> None:
    """Prompts of mixed lengths, two of them equal, rows that end early or with their first token, three at a time."""
    model = model_of(family)
    engine = NativeEngine(model, max_batch=3, routed_experts=True)
    done = engine.generate_batch(PROMPTS, settings())
    assert not any(module._forward_hooks for module in model.modules())
    for prompt, completion in zip(PROMPTS, done, strict=True):
        assert_own(model, prompt, completion)
    plain = NativeEngine(model, max_batch=3).generate_batch(PROMPTS, settings())
    assert [(c.ids, c.log_probs) for c in plain] == [(c.ids, c.log_probs) for c in done]
    assert not any(c.extras for c in plain)


def test_a_next_turn_has_the_experts_of_all_its_tokens() -> None:
    """Read from the kept state of the turn before, which no longer runs through any router."""
    engine = NativeEngine(MIXTURE, routed_experts=True)
    prompt = [3, 4, 5]
    for _ in range(3):
        (completion,) = engine.generate_batch([prompt], Sampling(max_new_tokens=5, seed=1))
        assert_own(MIXTURE, prompt, completion)
        prompt = [*prompt, *completion.ids, 9, 10]
    assert engine.num_prefill_tokens == 3 + 2 * 3  # a turn's last token is read with what follows it


LONG = 20_000  # tokens: a swap that was asked for comes before the last of them, however busy the machine is


@pytest.mark.parametrize("on_commit", ["keep", "recompute"])
def test_after_a_swap_each_token_keeps_the_experts_that_made_it(on_commit: OnCommit) -> None:
    model, new = copy.deepcopy(MIXTURE), tiny_mixture(seed=5)
    engine = NativeEngine(model, routed_experts=True, on_commit=on_commit, max_length=LONG + 4)
    prompt, begun, after = [3, 4, 5, 6], list[int](), list[int]()
    tasks: list[asyncio.Future[Any]] = []

    async def play() -> Completion:
        def heard(ids: Sequence[int], log_probs: Sequence[float]) -> None:
            (after if tasks and tasks[0].done() else begun).extend(ids)
            if len(begun) >= 4 and not tasks:
                tasks.append(asyncio.ensure_future(engine.update_weights(1, pieces_of(new.named_parameters()))))
            if len(after) >= 20 and len(tasks) == 1:
                tasks.append(asyncio.ensure_future(engine.cancel("long")))

        return await engine.generate(prompt, Sampling(max_new_tokens=LONG, seed=2), request_id="long", on_tokens=heard)

    done = asyncio.run(play())
    old = done.policy_versions.count(0)
    assert 4 <= old < len(done.ids) < LONG
    read = len(prompt) + old - 1
    ids = [*prompt, *done.ids]
    assert torch.equal(told(done)[:read], choice(MIXTURE, ids)[:read])
    if on_commit == "recompute":
        assert torch.equal(told(done)[read:-1], choice(new, ids)[read:-1])


def test_an_interrupted_answer_tells_the_experts_of_both_parts() -> None:
    engine = ResumableEngine(NativeEngine(MIXTURE, routed_experts=True))
    prompt = [3, 4, 5, 6]

    async def play() -> Completion:
        begun = asyncio.Event()
        sampling = Sampling(max_new_tokens=60, seed=2)
        asked = asyncio.create_task(engine.generate(prompt, sampling, on_tokens=lambda *_: begun.set()))
        await begun.wait()
        await engine.pause("abort")
        await engine.resume()
        return await asked

    done = asyncio.run(play())
    assert engine.interrupted == 1
    assert_own(MIXTURE, prompt, done)


def test_a_cancelled_answer_tells_those_of_what_it_has() -> None:
    engine = NativeEngine(MIXTURE, routed_experts=True)

    async def play() -> Completion:
        begun = asyncio.Event()
        sampling = Sampling(max_new_tokens=100, seed=2)
        asked = asyncio.create_task(
            engine.generate([3, 4], sampling, request_id="it", on_tokens=lambda *_: begun.set())
        )
        await begun.wait()
        await engine.cancel("it")
        return await asked

    done = asyncio.run(play())
    assert done.stop_reason == "abort"
    assert_own(MIXTURE, [3, 4], done)


def test_tokens_that_a_stop_text_dropped_leave_no_experts_to_those_in_their_place() -> None:
    engine = NativeEngine(MIXTURE, routed_experts=True)
    stream = Stream()
    stream.given([3, 4, 5])
    (done,) = engine.generate_batch([stream.ids], Sampling(max_new_tokens=9, seed=1))
    ids, log_probs, versions = done.ids[:3], done.log_probs[:3], done.policy_versions[:3]
    stream.sampled(replace(done, ids=ids, log_probs=log_probs, policy_versions=versions))
    stream.given([9, 10, 11, 12, 13, 14, 15])
    stream.sampled(engine.generate_batch([stream.ids], Sampling(max_new_tokens=5, seed=1))[0])
    experts = stream.segment().routed_experts
    assert experts is not None
    read = len(stream.ids) - 1
    assert torch.equal(experts.tensor()[:read].long().sort(-1).values, choice(MIXTURE, stream.ids)[:read])


def test_they_travel_through_an_episode_into_the_batch() -> None:
    """Two turns, written down and read again; the row of an engine that tells nothing has -1 throughout."""
    engine = build_rollout(RolloutConfig(routed_experts=True), MIXTURE)
    assert isinstance(engine, NativeEngine)
    stream, silent = Stream(), Stream()
    for given in ([3, 4, 5], [9, 10]):
        stream.given(given)
        stream.sampled(engine.generate_batch([stream.ids], Sampling(max_new_tokens=5, seed=1))[0])
    silent.given([3, 4])
    silent.sampled(replace(NativeEngine(MIXTURE).generate_batch([[3, 4]], Sampling(max_new_tokens=3, seed=1))[0]))
    stream.given([11])
    episodes = [Episode(f"t/{i}", "t", 0, (s.segment(),), Score(1.0), "done") for i, s in enumerate((stream, silent))]
    batch = to_batch(decode_episodes(encode_episodes(episodes)))
    rows = samples_of(batch[ROUTED_EXPERTS])
    assert [tuple(row.shape) for row in rows] == [(16, 2, 2), (5, 2, 2)]
    read = len(stream.ids) - 2
    assert torch.equal(rows[0][:read].long().sort(-1).values, choice(MIXTURE, stream.ids)[:read])
    assert bool((rows[0][read:] == -1).all())
    assert bool((rows[1] == -1).all())
    assert ROUTED_EXPERTS not in to_batch(episodes[1:])


@pytest.mark.parametrize(
    "model",
    [
        tiny_model(),
        LlamaForCausalLM(LlamaConfig(**{n: v for n, v in SMALL.items() if "expert" not in n and "moe" not in n})),
        MixtralForCausalLM(MixtralConfig(**{n: v for n, v in SMALL.items() if "moe" not in n}, num_local_experts=2)),
    ],
    ids=["dense hybrid", "dense", "a router that nobody tried"],
)
def test_a_module_without_a_known_router_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="leave routed_experts off"):
        NativeEngine(model, routed_experts=True)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="lean decoder knows no experts"):
        NativeEngine(MIXTURE, routed_experts=True, decoder="lean")
    with pytest.raises(ValueError, match="routed_experts has no effect"):
        RolloutConfig(backend="openai", routed_experts=True)
    with pytest.raises(ValueError, match="true or false"):
        RolloutConfig(routed_experts=1)  # type: ignore[arg-type]

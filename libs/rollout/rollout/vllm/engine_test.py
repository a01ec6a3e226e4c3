"""vLLM itself, in its own process and environment: what it samples is what the module says.

Each trap that vLLM was seen to have is a test, here or beside (engine_weights_test, process_test).
"""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine import Completion, PauseMode, Sampling
from rollout.testing.fuzz import forced_log_probs
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.served import ANSWER, MEAN, MOST, PROMPTS, VOCAB, assert_agrees, config, sample, served
from seqpack.capability import Unsupported

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    served().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[VllmEngine]:
    with VllmEngine(directory, config()) as engine:
        yield engine


@pytest.fixture
def model() -> PreTrainedModel:
    """The module of the directory; a test may change it."""
    return served()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_modules(engine: VllmEngine, model: PreTrainedModel, temperature: float) -> None:
    done = sample(engine, PROMPTS, Sampling(max_new_tokens=8, temperature=temperature))
    assert_agrees(model, PROMPTS, done, temperature)
    assert all(len(c.ids) == 8 and c.stop_reason == "length" for c in done)
    assert all(set(c.policy_versions) == {engine.version} for c in done)


def test_scores_of_tokens_are_the_modules(engine: VllmEngine, model: PreTrainedModel) -> None:
    for prompt in PROMPTS:
        found = asyncio.run(engine.score(prompt, 30))
        with torch.no_grad():
            table = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
        ids = torch.tensor(prompt)
        apart = [(found.log_probs[1:] - table.gather(1, ids[1:, None])[:, 0]).abs()]
        apart.append((found.top_log_probs[:, 1:].t() - table.gather(1, found.top_tokens[:, 1:].t())).abs().flatten())
        apart.append((found.rest[1:].exp() + found.top_log_probs[:, 1:].exp().sum(0) - 1).abs())
        assert torch.cat(apart).max() < MOST
        assert torch.cat(apart).mean() < MEAN
        assert (found.top_log_probs.diff(dim=0) <= 0).all()


def test_greedy_answers_have_the_modules_own_log_probs(engine: VllmEngine, model: PreTrainedModel) -> None:
    done = asyncio.run(engine.generate(PROMPTS[0], Sampling(max_new_tokens=16, greedy=True)))
    assert_agrees(model, PROMPTS[:1], [done])
    again = asyncio.run(engine.generate(PROMPTS[0], Sampling(max_new_tokens=16, greedy=True)))
    assert again == done


def test_log_probs_are_renormalised_over_what_top_k_and_top_p_leave(engine: VllmEngine, model: PreTrainedModel) -> None:
    done = sample(engine, PROMPTS, Sampling(max_new_tokens=1, top_k=5))
    apart = []
    for prompt, completion in zip(PROMPTS, done, strict=True):
        with torch.no_grad():
            best = model(torch.tensor([prompt])).logits.float()[0, -1].topk(5)
        if completion.ids[0] in best.indices.tolist():  # rounding may swap the fifth and the sixth
            at = best.indices.tolist().index(completion.ids[0])
            apart.append(abs(completion.log_probs[0] - best.values.log_softmax(-1)[at].item()))
    assert len(apart) > len(PROMPTS) / 2
    assert sum(apart) / len(apart) < 2 * MEAN
    assert all(c.log_probs[0] == 0 for c in sample(engine, PROMPTS, Sampling(max_new_tokens=1, top_p=1e-6)))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=12, temperature=1.3, min_p=0.02),
        Sampling(max_new_tokens=12, repetition_penalty=1.8),
        Sampling(max_new_tokens=12, presence_penalty=1.5, frequency_penalty=-0.5, temperature=0.8, top_k=20),
    ],
)
def test_log_probs_are_those_after_min_p_and_penalties(
    engine: VllmEngine, model: PreTrainedModel, sampling: Sampling
) -> None:
    apart = []
    for prompt, done in zip(PROMPTS, sample(engine, PROMPTS, sampling), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *done.ids]])).logits[0, len(prompt) - 1 : -1].float()
        for at, (token, found) in enumerate(zip(done.ids, done.log_probs, strict=True)):
            expected = forced_log_probs(logits[at], prompt, done.ids[:at], sampling)[token].item()
            if expected > -torch.inf:  # rounding may swap the tokens at an edge
                apart.append(abs(found - expected))
    assert len(apart) > 0.9 * 12 * len(PROMPTS)
    assert sum(apart) / len(apart) < 2 * MEAN


def test_a_stop_token_ends_and_is_kept(engine: VllmEngine) -> None:
    free = sample(engine, PROMPTS)
    stop = free[0].ids[3]
    done = sample(engine, PROMPTS, replace(ANSWER, stop_token_ids=(stop,)))
    for before, after in zip(free, done, strict=True):
        cut = before.ids.index(stop) + 1 if stop in before.ids else len(before.ids)
        assert after.ids == before.ids[:cut]
        assert after.stop_reason == ("stop" if stop in before.ids else "length")


def test_a_seed_fixes_a_request_whatever_its_neighbours(engine: VllmEngine) -> None:
    together = sample(engine, PROMPTS)
    assert sample(engine, PROMPTS) == together
    alone = asyncio.run(engine.generate(PROMPTS[5], replace(ANSWER, seed=5)))
    assert alone.ids == together[5].ids
    assert asyncio.run(engine.generate(PROMPTS[5], replace(ANSWER, seed=99))).ids != alone.ids


def test_a_seed_and_a_long_prompt_do_not_end_the_process(engine: VllmEngine, model: PreTrainedModel) -> None:
    long = [[5 + i % 200 for i in range(1200)]]
    assert_agrees(model, long, sample(engine, long))


def test_a_short_request_beside_long_ones(engine: VllmEngine) -> None:
    running: set[int] = set()

    async def ask() -> list[str]:
        ended: list[str] = []
        begun = asyncio.Event()

        def listen(*_: object) -> None:
            begun.set()
            running.add(engine.load().running)

        async def one(name: str, count: int) -> None:
            await engine.generate(PROMPTS[0], Sampling(max_new_tokens=count), on_tokens=listen)
            ended.append(name)

        long = asyncio.create_task(one("long", 1000))
        await begun.wait()
        await asyncio.gather(long, one("short", 1))
        return ended

    assert asyncio.run(ask()) == ["short", "long"]
    assert running == {1, 2}
    assert (engine.load().running, engine.load().waiting) == (0, 0)


def test_tokens_are_told_as_they_come(engine: VllmEngine) -> None:
    told: list[tuple[Sequence[int], Sequence[float]]] = []

    async def ask() -> Completion:
        return await engine.generate(PROMPTS[0], ANSWER, on_tokens=lambda ids, log_probs: told.append((ids, log_probs)))

    done = asyncio.run(ask())
    assert len(told) == 8
    assert tuple(i for ids, _ in told for i in ids) == done.ids
    assert tuple(x for _, log_probs in told for x in log_probs) == done.log_probs


def test_what_the_listener_raises_ends_the_request(engine: VllmEngine) -> None:
    def listener(ids: Sequence[int], log_probs: Sequence[float]) -> Never:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        asyncio.run(engine.generate(PROMPTS[0], replace(ANSWER, max_new_tokens=1000), on_tokens=listener))
    assert engine.load().running == 0


LONG = Sampling(max_new_tokens=1000)


def test_a_cancelled_request_answers_with_what_it_has(engine: VllmEngine, model: PreTrainedModel) -> None:
    async def ask() -> Completion:
        begun = asyncio.Event()
        task = asyncio.create_task(engine.generate(PROMPTS[0], LONG, request_id="it", on_tokens=lambda *_: begun.set()))
        await begun.wait()
        with pytest.raises(ValueError, match="in use"):
            await engine.generate(PROMPTS[0], LONG, request_id="it")
        assert await engine.cancel("it")
        done = await task
        assert not await engine.cancel("it")
        return done

    done = asyncio.run(ask())
    assert done.stop_reason == "abort"
    assert 0 < len(done.ids) < 1000
    assert_agrees(model, PROMPTS[:1], [done])


def test_a_deadline_ends_a_request(engine: VllmEngine) -> None:
    async def ask() -> Completion:
        return await engine.generate(PROMPTS[0], LONG, deadline=time.monotonic() + 0.3)

    done = asyncio.run(ask())
    assert done.stop_reason == "deadline"
    assert len(done.ids) < 1000


def test_a_cancelled_task_frees_its_place(engine: VllmEngine) -> None:
    async def ask() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(engine.generate(PROMPTS[0], LONG, on_tokens=lambda *_: begun.set()))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.pause()
        assert engine.load().running == 0
        await engine.resume()

    asyncio.run(ask())


def test_pause_holds_what_is_new_and_ends_or_finishes_what_runs(engine: VllmEngine) -> None:
    async def ask(mode: PauseMode) -> Completion:
        begun = asyncio.Event()
        running = asyncio.create_task(
            engine.generate(PROMPTS[0], Sampling(max_new_tokens=200), on_tokens=lambda *_: begun.set())
        )
        await begun.wait()
        await engine.pause(mode)
        assert running.done() or engine.load().running == 0
        waiting = asyncio.create_task(engine.generate(PROMPTS[1], ANSWER))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert engine.load().waiting == 1
        await engine.resume()
        assert (await waiting).stop_reason == "length"
        return await running

    assert asyncio.run(ask("finish")).stop_reason == "length"
    assert asyncio.run(ask("abort")).stop_reason == "abort"


@pytest.mark.parametrize(
    ("prompt", "sampling", "media", "problem"),
    [
        ([], ANSWER, None, "empty prompt"),
        ([VOCAB], ANSWER, None, "outside the model's vocabulary of 300"),
        ([3] * 1530, ANSWER, None, "max_length=1536"),
        ([3, 4], ANSWER, {"pixel_values": 1}, "vLLM's model sees nothing here"),
        ([3], ANSWER, None, "a prompt of one token ends vLLM's process"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    engine: VllmEngine, prompt: list[int], sampling: Sampling, media: dict[str, Any] | None, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        asyncio.run(engine.generate(prompt, sampling, media))


def test_vllm_refuses_to_sleep_on_a_cpu(engine: VllmEngine, directory: Path) -> None:
    with pytest.raises(ValueError, match=r"(?i)sleep mode is not supported"):
        VllmEngine(directory, config(sleep=True))
    with pytest.raises(ValueError, match=r"VllmConfig\(sleep=True\)"):
        asyncio.run(engine.sleep())
    refused = engine.supports("sleep")
    assert isinstance(refused, Unsupported)
    assert not refused
    assert "refuses it on a CPU" in refused.reason

"""Answers that are interrupted for new weights go on from their tokens; each token is that of the weights it names."""

import asyncio
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn

from rollout.engine import Completion, PauseMode, RolloutEngine, Sampling, StopReason
from rollout.native.engine import NativeEngine
from rollout.partial_rollout import ResumableEngine
from rollout.sync.manifest import Manifest, manifest_of
from rollout.sync.pieces import Bucket, buckets
from rollout.sync.transfer import transfer_weights
from rollout.testing.model import tiny_model
from rollout.testing.pieces import pieces_of

VOCAB, PROMPT = 24, [3, 5, 7]


def weights_of(model: nn.Module, version: int) -> tuple[Manifest, Iterator[Bucket]]:
    named = list(model.named_parameters())
    return manifest_of(version, pieces_of(named)), buckets(pieces_of(named), 20_000)


def forced(models: Sequence[nn.Module], done: Completion) -> list[float]:
    """Every token's log-prob by a stock forward pass of the weights whose version it names, over all before it."""
    row = torch.tensor([[*PROMPT, *done.ids]])
    by_version = {}
    for version in set(done.policy_versions):
        with torch.no_grad():
            logits = models[version](input_ids=row, use_cache=False).logits[0, len(PROMPT) - 1 : -1].double()
        by_version[version] = torch.log_softmax(logits, -1).gather(-1, torch.tensor(done.ids)[:, None])[:, 0]
    return [by_version[version][at].item() for at, version in enumerate(done.policy_versions)]


def test_log_probs_are_those_of_the_named_weights_through_two_interruptions() -> None:
    models = [tiny_model(VOCAB, layers=2, seed=seed) for seed in range(3)]
    native = NativeEngine(copy.deepcopy(models[0]))
    engine = ResumableEngine(native)

    async def play() -> list[Completion]:
        sampling = Sampling(max_new_tokens=200, seed=4)
        jobs = [asyncio.create_task(engine.generate(PROMPT, sampling)) for _ in range(3)]
        for version in (1, 2):
            begun = native.decode_steps
            while native.decode_steps < begun + 20:
                assert not any(job.done() for job in jobs)
                await asyncio.sleep(0.001)
            await transfer_weights([engine], *weights_of(models[version], version), pause="abort")
        return await asyncio.gather(*jobs)

    done = asyncio.run(play())
    assert engine.interrupted == 6
    for answer in done:
        assert len(answer.ids) == 200
        assert answer.stop_reason == "length"
        assert list(answer.policy_versions) == sorted(answer.policy_versions)
        assert set(answer.policy_versions) == {0, 1, 2}
        expected = forced(models, answer)
        assert max(abs(a - b) for a, b in zip(answer.log_probs, expected, strict=True)) < 1e-4


class Parts:
    """An engine that gives an answer in parts, as if it were interrupted."""

    def __init__(self, parts: Iterable[tuple[list[int], str]]) -> None:
        self.parts = list(parts)
        self.asked: list[tuple[list[int], Sampling]] = []
        self.outer: ResumableEngine | None = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, media: Mapping[str, Any] | None = None, **options: Any
    ) -> Completion:
        self.asked.append((list(prompt_ids), sampling))
        ids, stop = self.parts.pop(0)
        if stop == "interrupted":
            assert self.outer is not None
            await self.outer.pause("abort")
        reason: Any = "abort" if stop == "interrupted" else stop
        return Completion(tuple(ids), (-0.5,) * len(ids), reason, (len(self.asked),) * len(ids), {"experts": list(ids)})

    async def pause(self, mode: PauseMode = "finish") -> None:
        pass

    async def cancel(self, request_id: str) -> bool:
        return True


def played(parts: Iterable[tuple[list[int], str]], **options: Any) -> tuple[Completion, Parts]:
    inner = Parts(parts)
    inner.outer = ResumableEngine(cast(RolloutEngine, inner))
    sampling = Sampling(max_new_tokens=10, seed=7)
    return asyncio.run(inner.outer.generate([1, 2], sampling, **options)), inner


def test_what_there_is_becomes_the_end_of_the_prompt() -> None:
    done, inner = played([([5, 6], "interrupted"), ([], "interrupted"), ([8], "stop")])
    assert (done.ids, done.stop_reason, done.policy_versions) == ((5, 6, 8), "stop", (1, 1, 3))
    assert done.extras == {"experts": [5, 6, 8]}
    assert [prompt for prompt, _ in inner.asked] == [[1, 2], [1, 2, 5, 6], [1, 2, 5, 6]]
    assert [sampling.max_new_tokens for _, sampling in inner.asked] == [10, 8, 8]


def test_the_rest_is_drawn_from_another_seed_that_repeats() -> None:
    _, inner = played([([5, 6], "interrupted"), ([8], "interrupted"), ([9], "stop")])
    seeds = [sampling.seed for _, sampling in inner.asked]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert [s.seed for _, s in played([([5, 6], "interrupted"), ([8], "interrupted"), ([9], "stop")])[1].asked] == seeds
    nothing = played([([], "interrupted"), ([8], "stop")])[1]  # nothing was drawn: the first seed is as good as new
    assert [sampling.seed for _, sampling in nothing.asked] == [7, 7]


@pytest.mark.parametrize("reason", ["abort", "deadline", "length"])
def test_other_ends_are_ends(reason: StopReason) -> None:
    done, inner = played([([5], reason)])
    assert (done.ids, done.stop_reason) == ((5,), reason)
    assert len(inner.asked) == 1


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_that_count_the_completion_alone_are_refused(name: str) -> None:
    engine = ResumableEngine(NativeEngine(tiny_model(VOCAB, layers=2)))
    with pytest.raises(ValueError, match="take repetition_penalty"):
        asyncio.run(engine.generate(PROMPT, replace(Sampling(), **cast(Any, {name: 1.0}))))


def test_a_cancelled_answer_is_not_continued() -> None:
    inner = Parts([([5], "interrupted")])
    inner.outer = engine = ResumableEngine(cast(RolloutEngine, inner))

    async def play() -> Completion:
        assert await engine.cancel("mine")
        return await engine.generate([1], Sampling(max_new_tokens=4), request_id="mine")

    assert asyncio.run(play()).ids == (5,)

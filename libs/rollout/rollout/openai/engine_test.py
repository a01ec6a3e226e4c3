"""The engine behind a server, against a real server over the native engine: what comes back is what was sampled."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Never

import pytest
import torch

from rollout.config import RolloutConfig
from rollout.engine import Completion, PauseMode, RolloutEngine, Sampling
from rollout.native.engine import NativeEngine
from rollout.openai.engine import OpenAIEngine
from rollout.openai.settings.config import OpenAIConfig
from rollout.sync.manifest import Manifest
from rollout.testing.completions import CompletionServer
from rollout.testing.model import tiny_model

VOCAB = 48
PROMPTS = [[3 + i] * (2 + i % 4) + [7, 9 + i] for i in range(8)]
ANSWER = Sampling(max_new_tokens=8, seed=0)
LONG = Sampling(max_new_tokens=200, seed=1)


@pytest.fixture(scope="module")
def behind() -> NativeEngine:
    """The engine behind the server, which the test may ask too."""
    return NativeEngine(tiny_model(VOCAB))


@pytest.fixture
def served(behind: NativeEngine) -> Iterator[CompletionServer]:
    """The server, its address in `url`."""
    server = CompletionServer(behind)
    with server.open():
        yield server


@pytest.fixture
def engine(served: CompletionServer) -> OpenAIEngine:
    return engine_at(served.url, version=7)


def engine_at(url: str, version: int = 0, own: dict[str, Any] | None = None, **changes: Any) -> OpenAIEngine:
    config = RolloutConfig(backend="openai", openai=OpenAIConfig(url, **own or {}), **changes)
    return OpenAIEngine(config, version)


def ask_all(
    engine: OpenAIEngine, samplings: Sequence[Sampling], prompts: Sequence[Sequence[int]] = PROMPTS
) -> list[Completion]:
    async def ask() -> list[Completion]:
        return await asyncio.gather(*[engine.generate(p, s) for p, s in zip(prompts, samplings, strict=True)])

    return asyncio.run(ask())


# -- answers -----------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_engine_behind_the_server(engine: OpenAIEngine, behind: NativeEngine) -> None:
    """Beside requests that run, and with weights that were changed in place since."""

    async def both() -> list[Any]:
        answers = asyncio.gather(*[engine.generate(p, LONG) for p in PROMPTS])
        scores = [await one.score(PROMPTS[3], k) for one in (engine, behind) for k in (0, 5)]
        await answers
        return scores

    found = asyncio.run(both())
    for told, own in zip(found[:2], found[2:], strict=True):
        for name in ("log_probs", "top_tokens", "top_log_probs", "rest"):
            torch.testing.assert_close(getattr(told, name), getattr(own, name), rtol=0, atol=2e-6)
    assert len(asyncio.run(behind.score([5], 2)).rest) == 1
    for one in (engine, behind):
        with pytest.raises(ValueError, match="outside the model's vocabulary" if one is behind else "refuses"):
            asyncio.run(one.score([5, VOCAB], 2))
    with pytest.raises(ValueError, match="from 0 to the vocabulary's 48: got 49"):
        asyncio.run(behind.score([5, 6], 49))


def test_answers_are_those_of_the_engine_behind_the_server(engine: OpenAIEngine, behind: NativeEngine) -> None:
    """Ids, log-probs and ends, for every way to sample; a seed reaches it."""
    samplings = [
        ANSWER,
        replace(ANSWER, seed=1, temperature=0.5),
        replace(ANSWER, seed=2, top_k=3),
        replace(ANSWER, seed=3, top_p=0.5),
        replace(ANSWER, seed=3, min_p=0.3, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.5),
        Sampling(greedy=True, max_new_tokens=5),
        replace(ANSWER, seed=4, stop_token_ids=tuple(range(24))),
        replace(ANSWER, seed=5, max_new_tokens=1),
    ]
    found = ask_all(engine, samplings)
    wanted = [behind.generate_batch([p], s)[0] for p, s in zip(PROMPTS, samplings, strict=True)]
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.ids, ours.stop_reason) == (theirs.ids, theirs.stop_reason)
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-5)
        assert ours.policy_versions == (7,) * len(ours.ids)
    assert {c.stop_reason for c in found} == {"stop", "length"}
    assert isinstance(engine, RolloutEngine)


def test_a_request_without_a_seed_gets_one_of_the_engines(served: CompletionServer) -> None:
    first, again, other = (
        ask_all(engine_at(served.url, seed=seed), [replace(ANSWER, seed=None)] * 8) for seed in (5, 5, 6)
    )
    assert [c.ids for c in first] == [c.ids for c in again]
    assert [c.ids for c in first] != [c.ids for c in other]


def test_a_servers_own_defaults_do_not_count(engine: OpenAIEngine, served: CompletionServer) -> None:
    ask_all(engine, [ANSWER], PROMPTS[:1])
    said = served.bodies[-1]
    assert {
        "repetition_penalty": 1.0,
        "min_p": 0.0,
        "ignore_eos": True,
        "presence_penalty": 0.0,
    }.items() <= said.items()
    assert said["prompt"] == PROMPTS[0]
    assert "api_key" not in said


def test_tokens_are_told_as_they_come(engine: OpenAIEngine) -> None:
    told = []

    async def ask() -> Completion:
        begun = asyncio.get_running_loop()

        def hear(ids: Sequence[int], log_probs: Sequence[float]) -> None:
            assert asyncio.get_running_loop() is begun
            told.append((ids, log_probs))

        return await engine.generate(PROMPTS[0], LONG, on_tokens=hear)

    done = asyncio.run(ask())
    assert len(told) > 1  # so long an answer is not all there when a busy machine first looks
    assert tuple(i for ids, _ in told for i in ids) == done.ids
    assert tuple(x for _, log_probs in told for x in log_probs) == done.log_probs


def test_what_the_listener_raises_ends_the_request(engine: OpenAIEngine, served: CompletionServer) -> None:
    def listener(ids: Sequence[int], log_probs: Sequence[float]) -> Never:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        asyncio.run(engine.generate(PROMPTS[0], LONG, on_tokens=listener))
    assert (engine.load().running, engine.load().waiting) == (0, 0)
    left(served, 1)


def left(served: CompletionServer, count: int, seconds: float = 10) -> None:
    """The server has seen so many clients leave: it samples for nobody."""
    limit = time.monotonic() + seconds
    while served.gone < count:
        assert time.monotonic() < limit, "the server still samples"
        time.sleep(0.01)


# -- early ends --------------------------------------------------------------------------------------------------------


def test_a_cancelled_request_answers_with_what_it_has(
    engine: OpenAIEngine, served: CompletionServer, behind: NativeEngine
) -> None:
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
    assert 0 < len(done.ids) < 200
    assert behind.generate_batch(PROMPTS[:1], LONG)[0].ids[: len(done.ids)] == done.ids
    left(served, 1)


def test_a_deadline_ends_a_request(engine: OpenAIEngine, served: CompletionServer) -> None:
    async def ask() -> Completion:
        return await engine.generate(PROMPTS[0], replace(LONG, max_new_tokens=240), deadline=time.monotonic() + 0.1)

    served.change = slow
    done = asyncio.run(ask())
    assert done.stop_reason == "deadline"
    assert len(done.ids) < 240


def slow(event: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.02)
    return event


def test_a_cancelled_task_frees_its_place(engine: OpenAIEngine, served: CompletionServer) -> None:
    async def ask() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(engine.generate(PROMPTS[0], LONG, on_tokens=lambda *_: begun.set()))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(engine.pause(), 5)
        assert engine.load().running == 0
        await engine.resume()

    asyncio.run(ask())
    left(served, 1)


def test_so_many_requests_run_and_the_rest_wait(served: CompletionServer) -> None:
    engine = engine_at(served.url, max_batch=2)
    most = 0

    async def ask() -> list[Completion]:
        nonlocal most
        tasks = [asyncio.create_task(engine.generate(p, ANSWER)) for p in PROMPTS]
        while not all(task.done() for task in tasks):
            load = engine.load()
            most = max(most, load.running)
            assert load.running <= 2
            await asyncio.sleep(0)
        return [await task for task in tasks]

    done = asyncio.run(ask())
    assert most == 2
    assert all(len(c.ids) == 8 for c in done)
    assert (engine.load().running, engine.load().waiting) == (0, 0)


@pytest.mark.parametrize("mode", ["finish", "abort"])
def test_pause_holds_what_is_new_and_ends_or_finishes_what_runs(served: CompletionServer, mode: PauseMode) -> None:
    engine = engine_at(served.url, max_batch=1)

    async def ask() -> Completion:
        begun = asyncio.Event()
        running = asyncio.create_task(
            engine.generate(PROMPTS[0], replace(LONG, max_new_tokens=60), on_tokens=lambda *_: begun.set())
        )
        await begun.wait()
        waiting = asyncio.create_task(engine.generate(PROMPTS[1], ANSWER))
        await asyncio.sleep(0)
        await engine.pause(mode)
        assert engine.load().running == 0
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await engine.resume()
        assert (await waiting).stop_reason == "length"
        return await running

    assert asyncio.run(ask()).stop_reason == ("length" if mode == "finish" else "abort")


def test_weights_stay_what_they_are_and_who_hands_some_over_hears_why(engine: OpenAIEngine) -> None:
    read: list[int] = []

    def reading() -> Iterator[Any]:
        for i in range(3):
            read.append(i)
            yield None

    pieces = reading()
    for job in (engine.prepare(Manifest(1)), engine.receive(None), engine.commit(1), engine.update_weights(1, pieces)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="has no request that replaces weights"):
            asyncio.run(job)
    assert read == [0, 1, 2]
    assert not engine.supports("two_phase_weights")
    assert engine.version == 7


def test_two_event_loops_at_once_are_refused(engine: OpenAIEngine) -> None:
    async def ask() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(engine.generate(PROMPTS[0], LONG, on_tokens=lambda *_: begun.set()))
        await begun.wait()
        with pytest.raises(ValueError, match="two event loops at once"):
            await asyncio.to_thread(lambda: asyncio.run(engine.generate(PROMPTS[1], ANSWER)))
        task.cancel()

    asyncio.run(ask())

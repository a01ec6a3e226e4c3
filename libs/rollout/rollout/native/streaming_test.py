"""Tokens told while they are sampled, and how busy the engine says it is."""

import asyncio
import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.config import Admission
from rollout.engine import Completion, Load, Sampling
from rollout.native.engine import NativeEngine
from rollout.testing.forced import ForcedEngine
from rollout.testing.model import tiny_model
from rollout.testing.scripted import ScriptedEngine

VOCAB = 48
MODEL = tiny_model(VOCAB, layers=2)
LONG = Sampling(max_new_tokens=200, seed=1)


class Heard:
    """What `on_tokens` heard, call by call, and in which thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
        self.threads: set[int] = set()

    def __call__(self, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        assert len(ids) == len(log_probs) > 0
        self.calls.append((tuple(ids), tuple(log_probs)))
        self.threads.add(threading.get_ident())

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(i for ids, _ in self.calls for i in ids)

    def check(self, done: Completion) -> None:
        assert self.ids == done.ids
        assert tuple(p for _, log_probs in self.calls for p in log_probs) == done.log_probs
        assert self.threads <= {threading.get_ident()}


async def streamed(
    engine: NativeEngine | ScriptedEngine, prompt: Sequence[int], sampling: Sampling, **options: Any
) -> tuple[Heard, Completion]:
    """A completion; by its end everything was heard."""
    heard = Heard()
    done = await engine.generate(prompt, sampling, on_tokens=heard, **options)
    heard.check(done)
    return heard, done


async def decoded(engine: NativeEngine, steps: int = 3) -> None:
    """Wait until so many more steps have been decoded."""
    before = engine.decode_steps
    while engine.decode_steps < before + steps:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("admit", ["any_step", "rounds"])
@settings(max_examples=8, deadline=None)
@given(
    asked=st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 12), st.booleans(), st.sampled_from([(), (3, 4, 5, 6)])),
        min_size=1,
        max_size=7,
    )
)
def test_streamed_tokens_are_the_completions_own(
    admit: Admission, asked: list[tuple[int, int, bool, tuple[int, ...]]]
) -> None:
    engine = NativeEngine(MODEL, max_batch=3, admit=admit)

    async def one(i: int, size: int, count: int, stream: bool, stops: tuple[int, ...]) -> Completion:
        how = Sampling(max_new_tokens=count, seed=i, stop_token_ids=stops)
        if stream:
            return (await streamed(engine, [2 + i] * size, how))[1]
        return await engine.generate([2 + i] * size, how)

    async def play() -> list[Completion]:
        return await asyncio.gather(*(one(i, *how) for i, how in enumerate(asked)))

    alone = NativeEngine(MODEL)
    for i, (done, (size, count, _, stops)) in enumerate(zip(asyncio.run(play()), asked, strict=True)):
        how = Sampling(max_new_tokens=count, seed=i, stop_token_ids=stops)
        assert done.ids == alone.generate_batch([[2 + i] * size], how)[0].ids


def test_tokens_are_heard_while_the_rest_is_still_to_come() -> None:
    """Each call comes within a step: a listener that waits for the third token ends the request there."""
    engine = NativeEngine(MODEL)

    async def play() -> Completion:
        heard, third = Heard(), asyncio.Event()

        def listen(ids: Sequence[int], log_probs: Sequence[float]) -> None:
            heard(ids, log_probs)
            if len(heard.ids) >= 3:
                third.set()

        task = asyncio.create_task(engine.generate([3, 4], LONG, request_id="a", on_tokens=listen))
        await third.wait()
        assert not task.done()
        await engine.cancel("a")
        done = await task
        heard.check(done)
        return done

    done = asyncio.run(play())
    assert done.stop_reason == "abort"
    assert 3 <= len(done.ids) < 200
    assert done.ids == NativeEngine(MODEL).generate_batch([[3, 4]], LONG)[0].ids[: len(done.ids)]


@pytest.mark.parametrize("admit", ["any_step", "rounds"])
@pytest.mark.parametrize("error", [KeyError("unheard"), StopIteration(3)], ids=["an error", "StopIteration"])
def test_what_a_listener_raises_ends_its_request_alone(admit: Admission, error: Exception) -> None:
    engine = NativeEngine(MODEL, admit=admit)
    calls: list[Sequence[int]] = []

    def broken(ids: Sequence[int], log_probs: Sequence[float]) -> None:
        calls.append(ids)
        if len(calls) == 2:
            raise error

    async def play() -> tuple[Any, Completion, Completion]:
        hurt = engine.generate([3, 4], LONG, request_id="a", on_tokens=broken)
        whole = streamed(engine, [3, 5], Sampling(max_new_tokens=30, seed=2))
        told: list[Any] = list(await asyncio.gather(hurt, whole, return_exceptions=True))
        failed, (_, done) = told
        again = await engine.generate([3, 4], Sampling(max_new_tokens=2), request_id="a")
        return failed, done, again

    failed, done, again = asyncio.run(play())
    assert isinstance(failed, KeyError if isinstance(error, KeyError) else RuntimeError)
    assert len(calls) == 2
    assert (len(done.ids), len(again.ids)) == (30, 2)
    assert engine.decode_steps < 150  # its slot is free
    assert engine.load() == Load(0, 0)


def test_who_was_cancelled_hears_nothing_more() -> None:
    engine = NativeEngine(MODEL)

    async def play() -> None:
        heard = Heard()
        task = asyncio.create_task(engine.generate([3, 4], LONG, on_tokens=heard))
        other = asyncio.create_task(engine.generate([5], Sampling(max_new_tokens=60)))
        await decoded(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        known = heard.ids
        await other
        assert heard.ids == known

    asyncio.run(play())


def test_load_counts_who_runs_and_who_waits() -> None:
    engine = NativeEngine(copy.deepcopy(MODEL), max_batch=2)

    async def play() -> None:
        assert engine.load() == Load(0, 0)
        tasks = [asyncio.create_task(engine.generate([3 + i], LONG, request_id=str(i))) for i in range(5)]
        await asyncio.sleep(0)
        assert sum((engine.load().running, engine.load().waiting)) == 5
        await decoded(engine)
        assert engine.load() == Load(running=2, waiting=3)
        await engine.cancel("4")  # one that waits
        await decoded(engine)
        assert engine.load() == Load(running=2, waiting=2)
        await engine.cancel("0")
        await decoded(engine)
        assert engine.load() == Load(running=2, waiting=1)
        await engine.pause("abort")
        assert engine.load() == Load(running=0, waiting=1)
        await engine.cancel("3")
        await asyncio.gather(*tasks)
        await engine.resume()
        assert engine.load() == Load(0, 0)

    asyncio.run(play())


def test_load_counts_who_waits_for_a_round_and_the_synchronous_core() -> None:
    engine = NativeEngine(MODEL, admit="rounds")

    async def play() -> None:
        first = asyncio.create_task(engine.generate([3], LONG, request_id="a"))
        await decoded(engine)
        late = asyncio.create_task(engine.generate([4], Sampling(max_new_tokens=1)))
        await decoded(engine)
        assert engine.load() == Load(1, 1)
        await engine.cancel("a")
        await asyncio.gather(first, late)

    asyncio.run(play())
    engine.generate_batch([[3], [4]], Sampling(max_new_tokens=2))
    with pytest.raises(ValueError, match="empty prompt"):
        engine.generate_batch([[3], []], Sampling(max_new_tokens=2))
    assert engine.load() == Load(0, 0)


def test_a_load_is_counts() -> None:
    with pytest.raises(ValueError, match="counts"):
        Load(1, -1)


@pytest.mark.parametrize("make", [ScriptedEngine, lambda reply: ForcedEngine(MODEL, reply)])
def test_engines_of_tests_stream_too(
    make: Callable[[Callable[[list[int], int], Sequence[int]]], ScriptedEngine],
) -> None:
    engine = make(lambda prompt, turn: [5, 6, 7])
    heard, done = asyncio.run(streamed(engine, [3], Sampling(max_new_tokens=9, stop_token_ids=(7,))))
    assert len(heard.calls) == len(done.ids) == 3
    assert engine.load() == Load(0, 0)

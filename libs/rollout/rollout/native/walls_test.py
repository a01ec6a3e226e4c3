"""What the protocol promises of requests: cancel, deadlines, ids, and what becomes of those who no longer wait."""

import asyncio
import time

import pytest

from rollout.engine import Completion, Sampling, check_request
from rollout.native.engine import NativeEngine
from rollout.testing.model import tiny_model

LONG = Sampling(max_new_tokens=240)


@pytest.fixture
def engine() -> NativeEngine:
    return NativeEngine(tiny_model(48))


async def running(engine: NativeEngine, steps: int = 3) -> None:
    """Wait until so many more steps have been decoded."""
    before = engine.decode_steps
    while engine.decode_steps < before + steps:
        await asyncio.sleep(0.001)


def test_a_cancelled_request_answers_with_what_it_has(engine: NativeEngine) -> None:
    async def play() -> tuple[Completion, Completion]:
        task = asyncio.create_task(engine.generate([5, 6], LONG, request_id="a"))
        other = asyncio.create_task(engine.generate([5, 6], Sampling(max_new_tokens=60), request_id="b"))
        await running(engine)
        assert await engine.cancel("a")
        cut, whole = await asyncio.gather(task, other)
        assert not await engine.cancel("a")  # it is gone
        assert not await engine.cancel("never")
        return cut, whole

    cut, whole = asyncio.run(play())
    assert (cut.stop_reason, whole.stop_reason) == ("abort", "length")
    assert 1 <= len(cut.ids) == len(cut.log_probs) < 240
    assert len(whole.ids) == 60
    assert engine.decode_steps < 100


def test_who_no_longer_waits_has_no_place_in_the_batch(engine: NativeEngine) -> None:
    async def play() -> Completion:
        task = asyncio.create_task(engine.generate([5, 6], LONG, request_id="a"))
        await running(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not await engine.cancel("a")
        return await engine.generate([5, 6], Sampling(max_new_tokens=2), request_id="a")

    assert len(asyncio.run(play()).ids) == 2
    assert engine.decode_steps < 200


def test_a_deadline_ends_a_request(engine: NativeEngine) -> None:
    async def play() -> tuple[Completion, Completion]:
        late = engine.generate([5, 6], LONG, deadline=time.monotonic() - 1)
        ample = engine.generate([5, 6], Sampling(max_new_tokens=5), deadline=time.monotonic() + 3600)
        return await asyncio.gather(late, ample)

    late, ample = asyncio.run(play())
    assert late.stop_reason == "deadline"
    assert len(late.ids) <= 1
    assert ample.stop_reason == "length"


def test_a_request_id_serves_one_request_at_a_time(engine: NativeEngine) -> None:
    async def play() -> Completion:
        first = asyncio.create_task(engine.generate([5, 6], LONG, request_id="a"))
        await running(engine)
        with pytest.raises(ValueError, match="request_id 'a' is in use"):
            await engine.generate([5, 6], LONG, request_id="a")
        await engine.cancel("a")
        return await first

    assert asyncio.run(play()).stop_reason == "abort"


@pytest.mark.parametrize(
    ("prompt", "stops", "problem"),
    [
        ([], (), "empty prompt"),
        ([5, 48, 6], (), r"prompt holds the id 48 \(position 1\), outside the model's vocabulary of 48"),
        ([5, -1], (), r"prompt holds the id -1 \(position 1\)"),
        ([5], (3, 999), r"sampling.stop_token_ids holds the id 999 \(position 1\)"),
        ([5] * 20, (), "raise max_length"),
    ],
)
def test_a_request_that_cannot_be_served_says_why(prompt: list[int], stops: tuple[int, ...], problem: str) -> None:
    sampling = Sampling(max_new_tokens=4, stop_token_ids=stops)
    with pytest.raises(ValueError, match=problem):
        check_request(prompt, sampling, 48, 20)
    engine = NativeEngine(tiny_model(48), max_length=20)
    with pytest.raises(ValueError, match=problem):
        asyncio.run(engine.generate(prompt, sampling))
    with pytest.raises(ValueError, match=problem):
        engine.generate_batch([prompt], sampling)


def test_a_completion_is_aligned_and_says_how_it_ended() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        Completion((1, 2), (0.0,), "stop", (0, 0))
    with pytest.raises(ValueError, match="one of stop, length, abort, deadline"):
        Completion((), (), "done", ())  # type: ignore[arg-type]

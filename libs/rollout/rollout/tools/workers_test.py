"""Workers: nothing that runs in them can stall the loop, and what hangs is bounded. Held by order of events."""

import asyncio
import contextvars
import gc
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Never, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.tools.workers import MAX_IDLE, Ended, OverrunError, RefusedError, Workers, instant, waiting

T = TypeVar("T")
LONG = 60.0  # a limit no test reaches


def play(coroutine: Awaitable[T]) -> T:
    async def guarded() -> T:
        async with asyncio.timeout(LONG):
            return await coroutine

    return asyncio.run(guarded())


async def until(condition: Callable[[], object]) -> None:
    """Wait for a thread to have done something."""
    while not condition():
        await asyncio.sleep(0.001)


def test_a_value_comes_back_whether_blocking_or_async() -> None:
    async def coroutine(a: int, b: int) -> int:
        await asyncio.sleep(0)
        return a - b

    async def both() -> list[Ended]:
        pool = Workers("t")
        return [
            await pool.run("k", LONG, lambda a, b: a - b, 5, b=3),
            await pool.run("k", LONG, coroutine, 5, b=3),
            await pool.run("k", LONG, lambda: coroutine(5, 3)),  # an awaitable from a plain function
        ]

    assert [(e.value, e.error) for e in play(both())] == [(2, None)] * 3


class Odd(BaseException):
    """Derives from BaseException alone, as CheckpointException and pytest's own do."""


@pytest.mark.parametrize(
    "error", [ValueError("x"), SystemExit(3), KeyboardInterrupt(), TimeoutError(), asyncio.CancelledError(), Odd()]
)
@pytest.mark.parametrize(("is_async", "one_loop"), [(False, False), (True, False), (True, True)])
def test_whatever_is_raised_is_data_and_the_thread_lives(error: BaseException, is_async: bool, one_loop: bool) -> None:
    def fail() -> Never:
        raise error

    async def fail_async() -> Never:
        await asyncio.sleep(0)
        raise error

    async def twice() -> tuple[Ended, Ended, int]:
        pool = Workers("t", one_loop=one_loop)
        ended = await pool.run("k", LONG, fail_async if is_async else fail)
        return ended, await pool.run("k", LONG, threading.get_ident), pool.abandoned("k")

    ended, after, abandoned = play(twice())
    assert type(ended.error) is type(error)
    assert after.error is None
    assert abandoned == 0


def blocks_in_async(release: threading.Event) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        release.wait()  # no await: an event loop of others would stand still

    return run


@pytest.mark.parametrize("make", [lambda release: release.wait, blocks_in_async], ids=["blocking", "async"])
def test_code_that_blocks_obeys_its_limit_and_is_counted_until_it_ends(
    make: Callable[[threading.Event], Callable[[], Any]],
) -> None:
    async def story() -> None:
        pool, release = Workers("t", max_abandoned=2), threading.Event()
        hang = make(release)
        for count in (1, 2):
            with pytest.raises(OverrunError, match=r"no answer within 0\.3 s"):
                await pool.run("hangs", 0.3, hang)
            assert pool.abandoned("hangs") == count
        with pytest.raises(RefusedError, match="2 earlier calls of hangs still run"):
            await pool.run("hangs", LONG, hang)
        assert (await pool.run("another", LONG, int)).value == 0  # its neighbours are not refused
        release.set()
        await until(lambda: pool.abandoned("hangs") == 0)
        assert (await pool.run("hangs", LONG, int)).value == 0  # nor is it, once its threads are back

    play(story())


def test_calls_share_a_loop_until_one_blocks_it() -> None:
    async def loop() -> int:
        await asyncio.sleep(0)
        return id(asyncio.get_running_loop())

    async def story() -> None:
        pool, release = Workers("t", one_loop=True), threading.Event()
        shared = {(await pool.run("k", LONG, loop)).value for _ in range(3)}
        assert len(shared) == 1
        with pytest.raises(OverrunError):
            await pool.run("k", 0.1, blocks_in_async(release))
        assert (await pool.run("k", LONG, loop)).value not in shared
        release.set()
        await until(lambda: pool.abandoned("k") == 0)

    play(story())


def test_an_awaiting_call_is_cancelled_at_its_limit() -> None:
    async def story() -> None:
        pool, events = Workers("t"), []

        async def waits() -> None:
            try:
                await asyncio.sleep(LONG)
            finally:
                events.append("cancelled")

        with pytest.raises(OverrunError):
            await pool.run("k", 0.5, waits)
        await until(lambda: pool.abandoned("k") == 0)
        assert events == ["cancelled"]

    play(story())


def test_a_cancelled_caller_abandons_its_call() -> None:
    async def story() -> None:
        pool, started, release = Workers("t"), threading.Event(), threading.Event()

        def hang() -> None:
            started.set()
            release.wait()

        task = asyncio.create_task(pool.run("k", LONG, hang))
        await until(started.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.abandoned("k") == 1
        release.set()
        await until(lambda: pool.abandoned("k") == 0)

    play(story())


def test_hung_calls_delay_neither_the_loop_nor_other_calls_nor_the_default_executor() -> None:
    """R2: forty calls hang, more than the default executor has threads; all else goes on while they do."""

    async def story() -> list[str]:
        pool, release = Workers("t", max_abandoned=100), threading.Event()
        hung = [asyncio.create_task(pool.run(f"k{i % 2}", LONG, release.wait)) for i in range(40)]
        events = [
            (await pool.run("quick", LONG, lambda: "call")).value,
            await asyncio.to_thread(lambda: "default executor"),
        ]
        assert not any(task.done() for task in hung)
        release.set()
        await asyncio.gather(*hung)
        return events

    assert play(story()) == ["call", "default executor"]


def test_calls_run_side_by_side() -> None:
    """Each waits for all the others: one after another they would wait for ever."""

    async def story() -> list[Ended]:
        barrier = threading.Barrier(12)
        pool = Workers("t")
        return await asyncio.gather(*(pool.run("k", LONG, barrier.wait) for _ in range(12)))

    assert sorted(e.value for e in play(story())) == list(range(12))


def test_threads_are_used_again_and_few_are_kept() -> None:
    async def story() -> list[int]:
        pool = Workers("t")
        first = [(await pool.run("k", LONG, threading.get_ident)).value for _ in range(5)]
        barrier = threading.Barrier(MAX_IDLE + 9)
        await asyncio.gather(*(pool.run("k", LONG, barrier.wait) for _ in range(MAX_IDLE + 9)))
        await until(lambda: len(pool._idle) == MAX_IDLE)
        return first

    assert len(set(play(story()))) == 1


def test_an_outcome_nobody_waits_for_harms_nothing() -> None:
    """The loop that asked is closed before the thread answers."""
    pool, release = Workers("t"), threading.Event()

    async def leave() -> None:
        task = asyncio.create_task(pool.run("k", LONG, release.wait))
        await asyncio.sleep(0.01)
        assert not task.done()

    asyncio.run(leave())
    release.set()

    async def again() -> Ended:
        await until(lambda: pool.abandoned("k") == 0)
        return await pool.run("k", LONG, int)

    assert play(again()).value == 0


def test_the_context_is_the_callers() -> None:
    variable = contextvars.ContextVar("variable", default="none")

    async def read() -> str:
        return variable.get()

    async def story() -> list[str]:
        variable.set("the caller's")
        pool = Workers("t")
        return [(await pool.run("k", LONG, f)).value for f in (variable.get, read)]

    assert play(story()) == ["the caller's"] * 2


def test_an_idle_thread_keeps_nothing_alive() -> None:
    class Big:
        pass

    async def story() -> object:
        pool, big = Workers("t"), Big()
        ended = await pool.run("k", LONG, lambda thing: thing, big)
        seen = weakref.ref(big)
        del ended, big
        await pool.run("k", LONG, int)
        gc.collect()
        return seen()

    assert play(story()) is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["value", "error", "late", "async late", "cancelled"]), max_size=12))
def test_nothing_is_lost_or_left_whatever_the_mix(kinds: list[str]) -> None:
    async def story() -> None:
        pool, release = Workers("t", max_abandoned=100), threading.Event()

        async def one(kind: str, index: int) -> object:
            if kind == "value":
                return (await pool.run("k", LONG, lambda: index)).value
            if kind == "error":
                return repr((await pool.run("k", LONG, lambda: 1 // 0)).error)
            if kind == "cancelled":
                task = asyncio.create_task(pool.run("k", LONG, release.wait))
                await asyncio.sleep(0)
                task.cancel()
                return type((await asyncio.gather(task, return_exceptions=True))[0])
            try:
                return await pool.run("k", 0.005, release.wait if kind == "late" else blocks_in_async(release))
            except OverrunError:
                return kind

        answers = await asyncio.gather(*(one(kind, i) for i, kind in enumerate(kinds)))
        division = "ZeroDivisionError('integer division or modulo by zero')"
        expected = {"error": division, "cancelled": asyncio.CancelledError}
        assert answers == [i if k == "value" else expected.get(k, k) for i, k in enumerate(kinds)]
        release.set()
        await until(lambda: pool.abandoned("k") == 0)

    play(story())


def test_what_is_marked_instant_runs_at_once_where_it_is_called() -> None:
    @instant
    def here() -> int:
        return threading.get_ident()

    @instant
    def fails() -> Never:
        raise SystemExit(3)

    async def story() -> tuple[int, BaseException | None, Sequence[object]]:
        pool = Workers("t")
        return (await pool.run("k", LONG, here)).value, (await pool.run("k", LONG, fails)).error, pool._idle

    where, error, idle = play(story())
    assert where == threading.get_ident()
    assert isinstance(error, SystemExit)
    assert idle == []


def test_what_awaits_cannot_be_instant() -> None:
    async def waits() -> None:
        await asyncio.sleep(0)

    with pytest.raises(ValueError, match="waits awaits"):
        instant(waits)


def test_a_bound_must_allow_a_call() -> None:
    with pytest.raises(ValueError, match="max_abandoned must be at least 1"):
        Workers("t", max_abandoned=0)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_wait_for_others_is_not_the_calls_own_time(is_async: bool) -> None:
    """Four calls of a limit of a second take turns at one place: each waits longer than that, and none overruns."""
    place = threading.Semaphore(1)

    def taking() -> int:
        with waiting(), waiting():
            place.acquire()
        try:
            time.sleep(0.4)
        finally:
            place.release()
        return 1

    async def taking_async() -> int:
        return taking()

    async def all_of_them() -> list[int]:
        pool = Workers("t", max_abandoned=1)
        calls = (pool.run("k", 1.0, taking_async if is_async else taking) for _ in range(5))
        return [ended.value for ended in await asyncio.gather(*calls)]

    assert play(all_of_them()) == [1] * 5


def test_the_clock_goes_on_after_a_wait() -> None:
    ended = threading.Event()

    def hang() -> None:
        with waiting():
            time.sleep(0.1)
        ended.wait(LONG)

    async def overrun() -> None:
        pool = Workers("t")
        with pytest.raises(OverrunError):
            await pool.run("k", 0.05, hang)
        assert pool.abandoned("k") == 1
        ended.set()
        await until(lambda: not pool.abandoned("k"))

    play(overrun())


def test_a_wait_outside_a_call_changes_nothing() -> None:
    with waiting():
        pass


def test_a_call_that_hangs_among_many_is_not_the_end_of_its_key() -> None:
    pool, over = Workers("test", max_abandoned=1), threading.Event()

    async def calls() -> int:
        for _ in range(30):
            await pool.run("a", 10.0, int)
        with pytest.raises(OverrunError):
            await pool.run("a", 0.05, over.wait)
        return int((await pool.run("a", 10.0, int)).value)

    try:
        assert asyncio.run(calls()) == 0
    finally:
        over.set()

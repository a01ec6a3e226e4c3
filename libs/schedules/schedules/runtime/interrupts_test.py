"""SIGINT reaches a loop wherever it comes."""

import asyncio
import os
import random
import signal
import threading
import time
from typing import Never

import pytest

from schedules.runtime.interrupts import Runner, check, defer_interrupts, handle_interrupts, interrupted


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_nothing_is_noted_that_was_not_pressed() -> None:
    with handle_interrupts():
        check()


def test_it_is_raised_at_once() -> None:
    went_on = False
    try:
        with handle_interrupts():
            press()
            went_on = True
    except KeyboardInterrupt:
        assert not went_on
    else:
        raise AssertionError("no interrupt")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_finalizer_cannot_swallow_it() -> None:
    class Held:
        def __del__(self) -> None:
            press()

    finalized = Held()
    with handle_interrupts():
        del finalized  # Python prints the error and goes on
        with pytest.raises(KeyboardInterrupt):
            check()


def test_a_task_that_is_just_ending_cannot_swallow_it() -> None:
    async def ends_all_the_same() -> str | None:
        try:
            press()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            return "done"
        return None

    with handle_interrupts(), pytest.raises(KeyboardInterrupt), Runner() as runner:
        runner.run(ends_all_the_same())


def test_the_handler_of_before_comes_back_and_old_presses_are_forgotten() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), handle_interrupts():
        press()
    assert signal.getsignal(signal.SIGINT) is before
    with handle_interrupts():
        check()


def test_a_held_press_waits_until_the_block_is_over() -> None:
    done = []

    def press_within() -> None:
        with handle_interrupts(), defer_interrupts():
            with defer_interrupts():
                press()
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        press_within()
    assert done == ["inner", "outer"]


def test_a_second_press_does_not_wait() -> None:
    went_on = False

    def press_twice() -> None:
        nonlocal went_on
        with handle_interrupts(), defer_interrupts():
            press()
            press()
            went_on = True

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert not went_on


def test_a_press_takes_the_place_of_the_error_that_it_caused() -> None:
    def fail() -> Never:
        with handle_interrupts(), defer_interrupts():
            press()
            raise ValueError("cut short")

    with pytest.raises(KeyboardInterrupt):
        fail()


def test_a_press_ends_what_runs_in_a_loop_and_waits_for_its_threads() -> None:
    """As an evaluation that waits for a batch of the sampler's thread."""
    ended = []

    async def batch() -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.2)
            await asyncio.sleep(1000)
        finally:
            ended.append("batch")

    async def main() -> None:
        threading.Timer(0.05, press).start()
        await asyncio.gather(batch(), batch())

    with pytest.raises(KeyboardInterrupt), handle_interrupts(), Runner() as runner:
        runner.run(main())
    assert ended == ["batch", "batch"]


def test_a_press_between_two_runs_of_a_loop_is_raised() -> None:
    async def never() -> Never:
        raise AssertionError("it ran")

    def press_then_run() -> None:
        with Runner() as runner, handle_interrupts(), defer_interrupts():
            press()
            runner.run(never())

    with pytest.raises(KeyboardInterrupt):
        press_then_run()


def test_no_lock_stays_held_after_a_press_at_any_moment() -> None:
    """A queue puts under a condition: an interrupt after its lock was taken, before the block began, keeps it taken."""
    rng = random.Random(0)

    def take_and_give(shared: threading.Condition) -> None:
        with handle_interrupts():
            threading.Timer(rng.random() / 100, press).start()
            while True:
                with defer_interrupts():
                    for _ in range(50):
                        with shared:
                            pass

    for _ in range(100):
        shared = threading.Condition(threading.Lock())
        with pytest.raises(KeyboardInterrupt):
            take_and_give(shared)
        assert shared.acquire(blocking=False)


def test_a_loop_returns_what_its_coroutine_does() -> None:
    async def seven() -> int:
        return 7

    with handle_interrupts(), Runner() as runner:
        assert runner.run(seven()) == 7


def test_a_press_is_forgotten_where_nothing_is_noted_any_more() -> None:
    with pytest.raises(KeyboardInterrupt), handle_interrupts():
        press()
    assert not interrupted()
    check()
    with defer_interrupts():
        pass


def test_an_inner_block_forgets_no_press_of_the_outer() -> None:
    def press_within() -> None:
        with handle_interrupts():
            with handle_interrupts(), pytest.raises(KeyboardInterrupt):
                press()
            with handle_interrupts():
                assert interrupted()
            check()

    with pytest.raises(KeyboardInterrupt):
        press_within()

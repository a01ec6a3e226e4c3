"""SIGINT reaches a loop wherever it comes."""

import asyncio
import os
import signal

import pytest

from apps.common.interrupts import check, noted


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_nothing_is_noted_that_was_not_pressed():
    with noted():
        check()


def test_it_is_raised_at_once():
    went_on = False
    try:
        with noted():
            press()
            went_on = True
    except KeyboardInterrupt:
        assert not went_on
    else:
        raise AssertionError("no interrupt")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_finalizer_cannot_swallow_it():
    class Held:
        def __del__(self):
            press()

    held = Held()
    with noted():
        del held  # Python prints the error and goes on
        with pytest.raises(KeyboardInterrupt):
            check()


def test_a_task_that_is_just_ending_cannot_swallow_it():
    async def ends_all_the_same():
        try:
            press()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            return "done"

    with noted(), pytest.raises(KeyboardInterrupt), asyncio.Runner() as runner:
        runner.run(ends_all_the_same())


def test_the_handler_of_before_comes_back_and_old_presses_are_forgotten():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), noted():
        press()
    assert signal.getsignal(signal.SIGINT) is before
    with noted():
        check()

"""The fair lock: order of asking, nobody twice, and a waiter that gives up."""

import threading
import time
from typing import Never

import pytest

from rollout.native.scheduler.fair_lock import FairLock


def test_one_at_a_time_in_the_order_of_asking() -> None:
    lock, order, threads = FairLock(), list[int](), list[threading.Thread]()

    def work(i: int) -> None:
        with lock:
            order.append(i)

    with lock:
        for i in range(6):
            threads.append(threading.Thread(target=work, args=(i,)))
            threads[-1].start()
            while len(lock._queue) <= i:
                time.sleep(0.001)
        assert order == []
    for thread in threads:
        thread.join(30)
    assert order == list(range(6))


def test_a_loop_that_asks_again_at_once_lets_others_in() -> None:
    lock, stop, rounds = FairLock(), threading.Event(), list[int]()

    def loop() -> None:
        while not stop.is_set():
            with lock:
                rounds.append(1)
                time.sleep(0.002)

    thread = threading.Thread(target=loop)
    thread.start()
    while not rounds:
        time.sleep(0.001)
    for _ in range(5):
        with lock:
            before = len(rounds)
        with lock:
            assert len(rounds) - before <= 1
    stop.set()
    thread.join(30)


def test_an_error_inside_frees_it() -> None:
    lock = FairLock()
    with pytest.raises(ValueError, match="inside"), lock:
        raise ValueError("inside")
    with lock:
        pass


@pytest.mark.parametrize("turn_came", [False, True])
def test_who_is_interrupted_while_waiting_leaves_the_queue(turn_came: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FairLock()

    def interrupted(event: threading.Event) -> Never:
        if turn_came:  # the lock was handed over at the very moment
            lock.__exit__(None, None, None)
        raise KeyboardInterrupt

    lock.__enter__()
    monkeypatch.setattr(threading.Event, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lock.__enter__()
    monkeypatch.undo()
    if not turn_came:
        lock.__exit__(None, None, None)
    with lock:
        assert not lock._queue

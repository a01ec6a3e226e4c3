"""The decoding thread: it works while there is work, does what is posted between steps, and survives a broken step."""

import threading
import time
from collections.abc import Callable
from functools import partial

from rollout.native.scheduler.decode_thread import DecodeThread


class Work:
    """Counts down; notes what happened in order."""

    def __init__(self) -> None:
        self.left = 0
        self.broken = False
        self.log: list[str] = []
        self.failed = threading.Event()
        self.thread = DecodeThread(self.step, self.fail)

    def step(self) -> bool:
        self.thread.run_pending()
        if self.broken:
            self.broken = False
            raise RuntimeError("broken")
        if self.left:
            self.left -= 1
            self.log.append("step")
        return self.left > 0

    def fail(self, error: BaseException) -> None:
        self.log.append(str(error))
        self.failed.set()

    def add(self, count: int) -> None:
        self.log.append("post")
        self.left += count


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_it_works_until_nothing_is_left_and_wakes_again() -> None:
    work = Work()
    for _ in range(3):
        work.thread.post(lambda: work.add(2))
        work.thread.start()
        work.thread.start()
        until(lambda: not work.thread.awake)
    assert work.log == ["post", "step", "step"] * 3


def test_nothing_posted_is_ever_left_lying() -> None:
    work = Work()
    done: list[int] = []
    for i in range(2000):
        work.thread.post(partial(done.append, i))
        work.thread.start()
    until(lambda: len(done) == 2000)
    assert done == list(range(2000))


def test_a_broken_step_is_told_and_the_thread_serves_on() -> None:
    work = Work()
    work.broken = True
    work.thread.post(lambda: work.add(3))
    work.thread.start()
    assert work.failed.wait(30)
    work.thread.post(lambda: work.log.append("after"))
    work.thread.start()
    until(lambda: work.left == 0 and not work.thread.awake)
    assert work.log[:2] == ["post", "broken"]
    assert "after" in work.log
    assert work.log.count("step") == 3

"""The batching queue alone, with a function in place of an engine."""

import asyncio
import threading

import pytest

from rollout.queue import BatchingQueue


class Recorder:
    """Doubles its requests and keeps the batches it was given."""

    def __init__(self):
        self.batches = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, requests):
        self.batches.append(list(requests))
        assert self.gate.wait(30)
        if "bad" in requests:
            raise ValueError("bad request")
        return [r * 2 for r in requests]


def play(scenario, max_batch=100):
    run = Recorder()
    queue = BatchingQueue(run, max_batch)
    return asyncio.run(scenario(queue, run)), run.batches


async def settled():
    for _ in range(20):
        await asyncio.sleep(0.001)


def test_what_waits_at_once_is_one_batch():
    async def scenario(queue, run):
        return await asyncio.gather(*(queue.submit(i) for i in range(5)))

    assert play(scenario) == ([0, 2, 4, 6, 8], [[0, 1, 2, 3, 4]])


def test_requests_a_few_turns_late_still_join():
    async def late(queue, i):
        for _ in range(i):
            await asyncio.sleep(0)
        return await queue.submit(i)

    async def scenario(queue, run):
        return await asyncio.gather(*(late(queue, i) for i in range(3)))

    assert play(scenario) == ([0, 2, 4], [[0, 1, 2]])


def test_batches_are_bounded_and_in_order():
    async def scenario(queue, run):
        return await asyncio.gather(*(queue.submit(i) for i in range(5)))

    assert play(scenario, max_batch=2) == ([0, 2, 4, 6, 8], [[0, 1], [2, 3], [4]])


def test_an_error_is_that_batchs_alone():
    async def scenario(queue, run):
        first = asyncio.gather(queue.submit("bad"), queue.submit("x"), return_exceptions=True)
        errors = await first
        return errors, await queue.submit("y")

    (errors, after), _ = play(scenario)
    assert [str(e) for e in errors] == ["bad request"] * 2
    assert after == "yy"


def test_a_cancelled_request_is_not_run():
    async def scenario(queue, run):
        run.gate.clear()
        running = asyncio.create_task(queue.submit("a"))
        await settled()
        dropped, kept = asyncio.create_task(queue.submit("b")), asyncio.create_task(queue.submit("c"))
        await settled()
        dropped.cancel()
        run.gate.set()
        return await running, await kept

    assert play(scenario) == (("aa", "cc"), [["a"], ["c"]])


def test_cancelling_a_running_request_leaves_the_others():
    async def scenario(queue, run):
        run.gate.clear()
        one, two = asyncio.create_task(queue.submit("a")), asyncio.create_task(queue.submit("b"))
        await settled()
        one.cancel()
        run.gate.set()
        return await two

    assert play(scenario) == ("bb", [["a", "b"]])


@pytest.mark.parametrize("turns", range(6))
def test_a_pause_that_comes_while_a_batch_gathers_holds_it_back(turns):
    async def scenario(queue, run):
        waiting = asyncio.create_task(queue.submit("a"))
        for _ in range(turns):
            await asyncio.sleep(0)
        await queue.pause()
        at_pause = [list(b) for b in run.batches]
        late = asyncio.create_task(queue.submit("b"))
        await settled()
        assert run.batches == at_pause  # nothing begins after pause() has returned
        queue.resume()
        return await asyncio.gather(waiting, late)

    answers, batches = play(scenario)
    assert answers == ["aa", "bb"]
    assert sorted(request for batch in batches for request in batch) == ["a", "b"]


def test_exclusive_waits_for_the_running_batch_and_keeps_others_out():
    async def scenario(queue, run):
        run.gate.clear()
        first = asyncio.create_task(queue.submit("a"))
        await settled()
        entered = asyncio.Event()

        async def change():
            async with queue.exclusive():
                entered.set()
                count = len(run.batches)
                await settled()
                assert len(run.batches) == count

        changing = asyncio.create_task(change())
        second = asyncio.create_task(queue.submit("b"))
        await settled()
        assert not entered.is_set()
        run.gate.set()
        return (await asyncio.gather(changing, first, second))[1:]

    assert play(scenario) == (["aa", "bb"], [["a"], ["b"]])

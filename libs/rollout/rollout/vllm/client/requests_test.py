"""The table of requests, against a server that the test plays: who is asked when, and that everyone is answered."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, Never

import pytest
import torch

from rollout.engine import OnTokens, Sampling, StopReason
from rollout.errors import EpisodeFailed
from rollout.vllm.client.images import Image, Shown
from rollout.vllm.client.requests import VllmRequest, VllmRequests, ask_message


class Played:
    """A table, the messages that it sent, and requests made by number."""

    def __init__(self, copies: int = 1) -> None:
        self.sent: list[dict[str, Any]] = []
        self.to: list[int] = []
        self.table = VllmRequests(self.send, copies)

    def send(self, copy: int, message: dict[str, Any], tail: Sequence[memoryview] = ()) -> None:
        self.to.append(copy)
        self.sent.append(message)

    def ask(self, number: int, on_tokens: OnTokens | None = None, copy: int | None = None) -> VllmRequest:
        loop = asyncio.get_running_loop()
        sampling = Sampling(
            max_new_tokens=9,
            top_k=3,
            top_p=0.5,
            temperature=0.7,
            stop_token_ids=(4,),
            min_p=0.25,
            presence_penalty=0.5,
            repetition_penalty=1.5,
        )
        request = VllmRequest(number, (1, 2), sampling, 5, on_tokens, loop, loop.create_future(), copy=copy)
        self.table.add(request)
        return request

    def show(self, *images: Image) -> VllmRequest:
        """A request with images, the first at token 3, the others behind it."""
        request = self.ask(9)
        request.shown = Shown(images, tuple(range(3, 3 + len(images))), "digest")
        return request

    def dealt(self) -> list[tuple[Any, ...]]:
        """Who was asked of which copy, and ended there."""
        return [
            (copy, *([entry[0] for entry in message["ask"]] if "ask" in message else ("end", *message["end"])))
            for copy, message in zip(self.to, self.sent, strict=True)
        ]

    def asked(self) -> list[list[int]]:
        return [[entry[0] for entry in message["ask"]] for message in self.sent if "ask" in message]

    def ended(self) -> list[list[int]]:
        return [message["end"] for message in self.sent if "end" in message]


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def on_step(played: Played, *step: Sequence[Any], version: int = 7) -> None:
    """As the reader does, from a thread of its own."""
    thread = threading.Thread(target=played.table.on_step, args=([[*one, None] for one in step], version))
    thread.start()
    thread.join()


def test_an_image_that_several_requests_show_goes_once() -> None:
    one, other = (Image(name, (1, 2, 2), torch.full((4, 3), float(i))) for i, name in enumerate("ab"))

    async def run() -> None:
        played = Played()
        requests = [played.show(one), played.show(other, one), played.ask(10)]
        for number, request in enumerate(requests):
            request.number = number
        message, tail = ask_message(requests)
        assert [entry[3:] for entry in message["ask"]] == [[[0], (3,), "digest"], [[1, 0], (3, 4), "digest"], []]
        assert message["images"] == [["a", (1, 2, 2), 3], ["b", (1, 2, 2), 3]]
        assert [part.nbytes for part in tail] == [48, 48]
        assert "images" not in ask_message(requests[2:])[0]

    asyncio.run(run())


def test_requests_of_a_few_turns_go_in_one_message_as_the_server_reads_them() -> None:
    async def run() -> None:
        played = Played()
        played.ask(0)
        await asyncio.sleep(0)
        played.ask(1)
        await turns()
        played.ask(2)
        await turns()
        assert played.asked() == [[0, 1], [2]]
        assert played.table.counts() == (3, 0)
        how = {"max_tokens": 9, "temperature": 0.7, "top_k": 3, "top_p": 0.5, "stop_token_ids": [4], "seed": 5}
        how |= {"min_p": 0.25, "presence_penalty": 0.5, "frequency_penalty": 0.0, "repetition_penalty": 1.5}
        assert played.sent[0]["ask"][0] == [0, [1, 2], how]

    asyncio.run(run())


def test_tokens_are_gathered_with_the_version_of_their_step() -> None:
    async def run() -> None:
        played, heard = Played(), list[Any]()
        request = played.ask(0, lambda ids, log_probs: heard.append((ids, log_probs)))
        await turns()
        on_step(played, [0, [3], [-1.0], None], version=7)
        on_step(played, [0, [4], [-2.0], "stop"], version=8)
        done = await request.answer
        assert (done.ids, done.log_probs, done.policy_versions) == ((3, 4), (-1.0, -2.0), (7, 8))
        assert done.stop_reason == "stop"
        assert heard == [([3], [-1.0]), ([4], [-2.0])]
        assert played.table.counts() == (0, 0)

    asyncio.run(run())


def test_drafts_that_were_accepted_are_counted_by_decode_steps() -> None:
    """The first tokens of a request come from its prompt, and a step without any is none."""

    async def played_out() -> None:
        played = Played()
        for number in (1, 2):
            played.ask(number)
        await turns()
        assert played.table.take_accepted() is None
        on_step(played, [1, [5], [-1.0], None, None], [2, [], [], None, None])
        on_step(played, [1, [5, 6, 7], [-1.0] * 3, None, None], [2, [8], [-1.0], None, None])
        on_step(played, [1, [5], [-1.0], None, None], [2, [8, 9], [-1.0] * 2, "stop", None])
        assert played.table.take_accepted() == pytest.approx((2 + 0 + 1) / 3)
        assert played.table.take_accepted() is None

    asyncio.run(played_out())


@pytest.mark.parametrize("reason", ["abort", "deadline"])
def test_who_is_ended_has_what_it_got_and_the_reason(reason: StopReason) -> None:
    async def run() -> None:
        played = Played()
        waiting, running, ended = played.ask(0), None, None
        played.table.end(waiting, reason)
        assert (await waiting.answer).stop_reason == reason
        running, ended = played.ask(1), played.ask(2)
        await turns()
        on_step(played, [1, [3], [-1.0], None])
        played.table.end(running, reason)
        played.table.end(ended, reason)
        on_step(played, [1, [], [], "abort"], [2, [5], [-1.0], "length"])  # the second was done before it was told
        assert ((await running.answer).ids, (await running.answer).stop_reason) == ((3,), reason)
        assert (await ended.answer).stop_reason == "length"
        assert played.asked() == [[1, 2]]
        assert played.ended() == [[1], [2]]

    asyncio.run(run())


def test_a_dropped_request_hears_nothing_and_holds_nobody_up() -> None:
    async def run() -> None:
        played = Played()
        request = played.ask(0)
        await turns()
        holding = asyncio.create_task(played.table.hold(abort=False))
        await turns()
        assert not holding.done()
        request.answer.cancel()
        played.table.drop(request)
        await asyncio.wait_for(holding, 5)
        on_step(played, [0, [3], [-1.0], "stop"])
        await turns()
        assert request.ids == []
        assert played.ended() == [[0]]

    asyncio.run(run())


def test_held_requests_wait_and_go_together_at_the_release() -> None:
    async def run() -> None:
        played = Played()
        first = played.ask(0)
        await turns()
        holding = asyncio.create_task(played.table.hold(abort=True))
        await turns()
        assert played.ended() == [[0]]
        on_step(played, [0, [], [], "abort"])
        await asyncio.wait_for(holding, 5)
        assert (await first.answer).stop_reason == "abort"
        played.ask(1)
        await turns()
        played.ask(2)
        await turns()
        assert played.asked() == [[0]]
        assert played.table.counts() == (0, 2)
        played.table.release()
        assert played.asked() == [[0], [1, 2]]

    asyncio.run(run())


def test_who_gives_up_holding_releases_what_waited() -> None:
    async def run() -> None:
        played = Played()
        played.ask(0)
        await turns()
        holding = asyncio.create_task(played.table.hold(abort=False))
        await turns()
        played.ask(1)
        await turns()
        holding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holding
        assert played.asked() == [[0], [1]]

    asyncio.run(run())


def test_a_listener_that_raises_ends_its_request_alone() -> None:
    async def run() -> None:
        played = Played()

        def listener(ids: Sequence[int], log_probs: Sequence[float]) -> Never:
            raise LookupError("enough")

        one, other = played.ask(0, listener), played.ask(1)
        await turns()
        on_step(played, [0, [3], [-1.0], None], [1, [3], [-1.0], "length"])
        with pytest.raises(LookupError, match="enough"):
            await one.answer
        assert (await other.answer).stop_reason == "length"
        assert played.ended() == [[0]]

    asyncio.run(run())


def test_when_the_process_is_gone_everyone_hears_and_nobody_is_asked_again() -> None:
    async def run() -> None:
        played = Played()
        asked = played.ask(0)
        await turns()
        waiting = played.ask(1)
        failing = threading.Thread(target=played.table.fail_all, args=(RuntimeError("gone"),))
        failing.start()
        failing.join()
        for request in (asked, waiting):
            with pytest.raises(RuntimeError, match="gone"):
                await request.answer
        with pytest.raises(RuntimeError, match="gone"):
            played.ask(2)
        assert played.asked() == [[0]]
        await asyncio.wait_for(played.table.hold(abort=False), 5)

    asyncio.run(run())


def test_what_the_server_refuses_is_raised_where_it_was_asked() -> None:
    async def run() -> None:
        played = Played()
        request = played.ask(0)
        await turns()
        played.table.refused(0, ValueError("no such stop token"))
        with pytest.raises(ValueError, match="no such stop token"):
            await request.answer

    asyncio.run(run())


def test_a_request_goes_to_the_copy_that_has_the_fewest_or_that_it_names() -> None:
    async def run() -> None:
        played = Played(copies=3)
        for number in range(4):
            played.ask(number)
        played.ask(4, copy=2)
        await turns()
        assert played.dealt() == [(0, 0, 3), (1, 1), (2, 2, 4)]
        on_step(played, [0, [3], [-1.0], "stop"], [3, [3], [-1.0], "stop"])
        await turns()
        for number in (5, 6, 7):
            played.ask(number)
        await turns()
        assert played.dealt()[3:] == [(0, 5, 6), (1, 7)]

    asyncio.run(run())


def test_who_is_ended_is_ended_where_it_was_asked() -> None:
    async def run() -> None:
        played = Played(copies=2)
        one, _, other = [played.ask(number) for number in range(3)], played.ask(3), played.ask(4)
        await turns()
        played.table.end(one[1], "abort")
        played.table.drop(other)
        holding = asyncio.create_task(played.table.hold(abort=True))
        await turns()
        assert played.dealt()[2:] == [(1, "end", 1), (0, "end", 4), (0, "end", 0, 2), (1, "end", 1, 3)]
        holding.cancel()

    asyncio.run(run())


def test_a_dead_copys_requests_may_be_asked_again_and_go_to_the_others() -> None:
    async def run() -> None:
        played = Played(copies=2)
        requests = [played.ask(number) for number in range(4)]
        await turns()
        failing = threading.Thread(target=played.table.fail_copy, args=(1, EpisodeFailed("copy 1 is gone", True)))
        failing.start()
        failing.join()
        for request in requests[1::2]:
            with pytest.raises(EpisodeFailed, match="copy 1 is gone") as failed:
                await request.answer
            assert failed.value.retryable
        assert not any(request.answer.done() for request in requests[::2])
        played.ask(4)
        named = played.ask(5, copy=1)
        await turns()
        assert played.dealt()[2:] == [(0, 4)]
        with pytest.raises(EpisodeFailed, match="copy 1 is gone"):
            await named.answer
        assert played.table.counts() == (3, 0)

    asyncio.run(run())

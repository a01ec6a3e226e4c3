"""What copies are told and when, with servers that the test plays: weights in all or none, a dead copy is left out."""

import asyncio
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import rollout.vllm.client.replicas
from rollout.vllm.client.process import own_devices
from rollout.vllm.client.replicas import Message, Replicas, of_copy
from rollout.vllm.client.wire import Wire
from rollout.vllm.settings.config import VllmConfig


class PlayedProcess:
    """A process whose other end of the wire the test holds."""

    made: list["PlayedProcess"]

    def __init__(self, config: VllmConfig, descriptors: Sequence[int], copy: int) -> None:
        ours, theirs = socket.socketpair()
        self.wire, self.far, self.copy = Wire(ours), Wire(theirs), copy
        self.pid = 100 + copy
        self.workers: list[int] = []
        self.made.append(self)

    def has_workers(self, pids: Sequence[int]) -> None:
        self.workers += pids

    def last_words(self) -> str:
        return f"words of {self.copy}"

    def close(self) -> None:
        self.far.close()

    def hears(self) -> Any:
        return self.far.receive(5)


Played = tuple[Replicas, list[PlayedProcess], list[tuple[int, str]], list[threading.Event]]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    """Two copies that listen, their processes, and what was heard of them."""
    yield from _played(monkeypatch)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    """The same of two that share experts."""
    yield from _played(monkeypatch, expert_parallel=True, experts_over_copies=True)


def _played(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[Played]:
    monkeypatch.setattr(rollout.vllm.client.replicas, "VllmProcess", PlayedProcess)
    PlayedProcess.made = []
    copies = Replicas(VllmConfig(data_parallel=2, start_seconds=5, **settings), ())
    heard: list[Message] = []
    lost: list[tuple[int, str]] = []
    gone = [threading.Event(), threading.Event()]

    def ends(copy: int, words: str) -> None:
        lost.append((copy, words))
        gone[copy].set()

    copies.listen(heard.append, ends)
    yield copies, PlayedProcess.made, lost, gone
    copies.close()


async def heard_by(process: PlayedProcess) -> Any:
    return await asyncio.to_thread(process.hears)


def answer(process: PlayedProcess, message: dict[str, Any], **found: Any) -> None:
    process.far.send({"loaded": message["load"]["call"], **found})


def test_all_wait_until_the_last_has_the_weights_and_then_go_together(played: Played) -> None:
    copies, (one, other), *_ = played

    async def run() -> None:
        call = asyncio.create_task(copies.call("load", {"path": "p"}, in_step=True))
        first, second = await heard_by(one), await heard_by(other)
        assert first == second
        assert (first["load"]["path"], first["load"]["wait"]) == ("p", True)
        answer(one, first, seconds=3.0)
        await asyncio.sleep(0.1)
        assert not call.done()
        answer(other, second, seconds=2.0)
        assert await asyncio.wait_for(call, 5) == 3.0
        assert "go" in await heard_by(one)
        assert "go" in await heard_by(other)

    asyncio.run(run())


def test_where_one_does_not_take_them_none_goes_on(played: Played) -> None:
    copies, (one, other), *_ = played

    async def run() -> None:
        call = asyncio.create_task(copies.call("load", {}, in_step=True))
        first, second = await heard_by(one), await heard_by(other)
        answer(one, first, seconds=1.0)
        answer(other, second, error="too large")
        with pytest.raises(RuntimeError, match=r"^copy 1 of 2: too large$"):
            await asyncio.wait_for(call, 5)
        copies.tell("load", {"path": "old"})
        assert (await heard_by(one))["load"]["path"] == "old"  # and no word before it
        assert not (await heard_by(other))["load"]["wait"]

    asyncio.run(run())


def test_nobody_waits_for_a_copy_that_dies_meanwhile(played: Played) -> None:
    copies, (one, other), lost, gone = played

    async def run() -> None:
        call = asyncio.create_task(copies.call("load", {}, in_step=True))
        first, _ = await heard_by(one), await heard_by(other)
        other.far.close()
        await asyncio.to_thread(gone[1].wait, 5)
        assert lost == [(1, "words of 1")]
        assert (copies.alive, copies.dead) == ([0], {1: "words of 1"})
        assert not call.done()
        answer(one, first, seconds=1.0)
        assert await asyncio.wait_for(call, 5) == 1.0
        again = asyncio.create_task(copies.call("load", {}))
        await heard_by(one)  # go
        await heard_by(one)
        one.far.close()
        with pytest.raises(RuntimeError, match="words of 0"):
            await asyncio.wait_for(again, 5)
        with pytest.raises(RuntimeError, match="words of"):
            await copies.call("load", {})

    asyncio.run(run())


def test_copies_that_share_experts_hear_of_all_in_one_order(joined: Played) -> None:
    """Of what another is told, its number alone."""
    copies, (one, other), *_ = joined

    async def run() -> None:
        copies.send(1, {"ask": [3]})
        assert (await heard_by(one), await heard_by(other)) == ({"turn": 1}, {"ask": [3], "turn": 1})
        call = asyncio.create_task(copies.call("load", {"path": "p"}, in_step=True))
        first, second = await heard_by(one), await heard_by(other)
        assert first == second
        assert (first["load"]["path"], first["load"]["wait"], first["turn"]) == ("p", True, 2)
        answer(other, second, seconds=1.0)
        answer(one, first, seconds=2.0)
        assert await asyncio.wait_for(call, 5) == 2.0
        assert await heard_by(one) == await heard_by(other) == {"go": first["load"]["call"], "turn": 3}
        copies.tell("load", {"path": "old"})
        assert [(await heard_by(process))["turn"] for process in (one, other)] == [4, 4]

    asyncio.run(run())


def test_a_copy_that_dies_takes_those_with_it_that_share_its_experts(joined: Played) -> None:
    copies, (one, other), lost, gone = joined

    async def run() -> None:
        call = asyncio.create_task(copies.call("load", {}, in_step=True))
        await heard_by(one), await heard_by(other)
        other.far.close()
        with pytest.raises(RuntimeError, match=r"^copy 1 of 2: words of 1$"):
            await asyncio.wait_for(call, 5)
        await asyncio.to_thread(gone[1].wait, 5)
        assert await heard_by(one) is None  # it is told to end
        assert lost == [(1, "words of 1")]
        assert (copies.alive, copies.dead) == ([], {0: "words of 1", 1: "words of 1"})
        with pytest.raises(RuntimeError, match="words of 1"):
            await copies.call("load", {})

    asyncio.run(run())


def test_copies_that_share_experts_find_each_other_on_this_machine(joined: Played, played: Played) -> None:
    copies, *_ = joined
    together = copies.together()
    assert together is not None
    assert together["size"] == 2
    assert played[0].together() is None
    start = {"engine": {"seed": 7}, "together": together}
    for copy in (0, 1):
        assert of_copy(start, copy)["together"] == together | {"rank": copy}
    for port in (together["port"], together["port"] + 1):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))


def test_each_copy_sees_devices_of_its_own() -> None:
    config = VllmConfig(tensor_parallel=2, data_parallel=2)
    given = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert own_devices(config, given, 0) == {"CUDA_VISIBLE_DEVICES": "4,5", "ASCEND_RT_VISIBLE_DEVICES": "0,1"}
    assert own_devices(config, given, 1) == {"CUDA_VISIBLE_DEVICES": "6,7", "ASCEND_RT_VISIBLE_DEVICES": "2,3"}
    assert own_devices(VllmConfig(tensor_parallel=2), given, 0) == {}
    shared = VllmConfig(data_parallel=4, copies_per_device=2)
    assert shared.devices == 2
    seen = [own_devices(shared, given, copy)["CUDA_VISIBLE_DEVICES"] for copy in range(4)]
    assert seen == ["4", "4", "5", "5"]
    with pytest.raises(ValueError, match="4 copies of which 2 share a device need 2, CUDA_VISIBLE_DEVICES names 1"):
        own_devices(shared, {"CUDA_VISIBLE_DEVICES": "7"}, 0)
    with pytest.raises(ValueError, match="2 copies of 2 devices need 4, CUDA_VISIBLE_DEVICES names 3"):
        own_devices(config, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, 0)


def test_a_copy_that_leaves_its_first_prompt_unanswered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout.vllm.client.replicas, "VllmProcess", PlayedProcess)
    PlayedProcess.made = []
    copies = Replicas(VllmConfig(data_parallel=2), ())
    one, other = PlayedProcess.made
    one.far.send({"step": [[-1, [5], [0.0], "length", None]], "version": 0})
    with pytest.raises(RuntimeError, match=r"did not answer its first prompt in 0\.1 s\. words of 1"):
        copies.ask_first(seconds=0.1)
    assert one.hears()["ask"][0][0] == -1
    other.far.close()  # it died
    with pytest.raises(RuntimeError, match="words of 0"):
        copies.ask_first(seconds=0.1)
    copies.close()


def test_copies_on_a_device_start_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other devices do so beside them."""
    monkeypatch.setattr(rollout.vllm.client.replicas, "VllmProcess", PlayedProcess)
    PlayedProcess.made = []
    copies = Replicas(VllmConfig(data_parallel=4, copies_per_device=2, start_seconds=5), ())
    told: list[list[int]] = []

    def play() -> None:
        for turn in ((0, 2), (1, 3)):
            for copy in turn:
                assert PlayedProcess.made[copy].hears() == {"start": {"engine": {"seed": 7 + copy}, "tied": {}}}
            others = [process for process in PlayedProcess.made if process.copy not in turn]
            told.append([process.copy for process in others if _has_mail(process)])
            for copy in turn:
                PlayedProcess.made[copy].far.send({"ready": {"copy": copy, "workers": [7 + copy]}})

    player = threading.Thread(target=play)
    player.start()
    copies.begin({"engine": {"seed": 7}, "tied": {}})
    facts = copies.wait_until_ready()
    player.join(5)
    copies.close()
    assert (facts, told) == ({"copy": 0, "workers": [7]}, [[], []])
    assert [process.workers for process in PlayedProcess.made] == [[7], [8], [9], [10]]


def _has_mail(process: PlayedProcess) -> bool:
    return bool(select.select([process.far._end], [], [], 0.1)[0])

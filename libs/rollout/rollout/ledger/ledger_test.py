"""The ledger against a model of it, cut at every byte, damaged, killed, with a full disk, and large."""

import multiprocessing
import os
import random
import resource
import signal
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from rollout.ledger.ledger import RolloutLedger
from rollout.ledger.records import MAGIC, Kind, frame, number_body


def fill(
    ledger: RolloutLedger, steps: int = 3, batch: int = 2, ahead: int = 1, save_every: int = 2, size: int = 40
) -> dict[int, bytes]:
    """A run: groups are begun and finished a little ahead of the steps that train them; what it would be sent."""
    payloads: dict[int, bytes] = {}
    for step in range(1, steps + 1):
        for group in range((step - 1) * batch, step * batch + ahead):
            if group not in payloads:
                ledger.started(group, step - 1)
                payloads[group] = f"{group}:".encode() + b"x" * size
                ledger.finished(group, payloads[group])
        ledger.train(step, range((step - 1) * batch, step * batch))
        if step % save_every == 0:
            ledger.saved(step)
    return payloads


def told(ledger: RolloutLedger) -> tuple[Any, ...]:
    """All that a run can learn from a ledger."""
    state = ledger.state
    sampled = {group: (found.version, ledger.payload(group)) for group, found in state.sampled.items()}
    return state.saved, state.done.pairs(), sampled, dict(state.batches), state.missing(), state.next


def test_a_ledger_that_is_opened_again_says_the_same(tmp_path: Path) -> None:
    with RolloutLedger(tmp_path / "ledger") as ledger:
        payloads = fill(ledger)
        ledger.started(9, 3)
        before = told(ledger)
        assert ledger.state.running == {9: 3}
    with RolloutLedger(tmp_path / "ledger", 2) as ledger:
        saved, done, sampled, batches, missing, after = told(ledger)
        assert (saved, done, batches) == (2, [0, 4], {3: (4, 5)})
        assert sampled == {4: (1, payloads[4]), 5: (2, payloads[5]), 6: (2, payloads[6])}
        assert missing == [7, 8, 9][: after - 7]
        assert (saved, done, sampled, batches) == before[:4]
        assert not ledger.state.running  # nobody samples them any more


def test_a_record_is_written_before_its_call_returns(tmp_path: Path) -> None:
    ledger = RolloutLedger(tmp_path / "ledger", fsync="never")
    sizes = [os.stat(tmp_path / "ledger").st_size]
    acts: tuple[Callable[[], None], ...] = (
        lambda: ledger.started(0, 0),
        lambda: ledger.finished(0, b"abc"),
        lambda: ledger.train(1, [0]),
    )
    for act in acts:
        act()
        sizes.append(os.stat(tmp_path / "ledger").st_size)
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("compacted", [False, True])
def test_a_file_cut_at_any_byte_is_the_ledger_of_a_moment_before(tmp_path: Path, compacted: bool) -> None:
    with RolloutLedger(tmp_path / "ledger") as ledger:
        if compacted:
            fill(ledger, size=3)
            ledger.compact()
        moments = {ledger._end: told(ledger)}
        real = ledger._write

        def noted(data: bytes) -> None:
            real(data)
            moments[ledger._end] = told(ledger)

        ledger._write = noted  # type: ignore[method-assign]
        for group in (40, 41, 42):
            ledger.started(group, 7)
            ledger.finished(group, b"a")
        ledger.train(ledger.state.saved + len(ledger.state.batches) + 1, [42])
        ledger.started(43, 7)
        ledger.again(43)
        ledger.started(44, 7)
        ledger.no_signal(44)
    data = (tmp_path / "ledger").read_bytes()
    for size in range(min(moments), len(data) + 1):
        (tmp_path / "cut").write_bytes(data[:size])
        expected = moments[max(end for end in moments if end <= size)]
        with RolloutLedger(tmp_path / "cut") as ledger:
            assert told(ledger)[:4] == expected[:4]
            ledger.started(100, 1)  # the torn tail is gone: what is appended now is read again
            ledger.finished(100, b"b")
        with RolloutLedger(tmp_path / "cut") as ledger:
            assert ledger.payload(100) == b"b"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_byte_is_told_unless_it_is_in_the_tail(
    tmp_path_factory: pytest.TempPathFactory, data: DataObject
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "ledger"
    with RolloutLedger(path, fsync="never") as ledger:
        fill(ledger, steps=2, save_every=5, size=5)
        last = len(frame(Kind.TRAIN, bytes(24)))
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(len(MAGIC), len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bytes(whole))
    if at < len(whole) - last:
        with pytest.raises(ValueError, match=r"the record at byte \d+ is damaged, and others follow it"):
            RolloutLedger(path)
    else:
        with RolloutLedger(path) as ledger:
            assert ledger.state.batches == {1: (0, 1)}


def test_zeros_at_the_end_are_a_torn_tail(tmp_path: Path) -> None:
    with RolloutLedger(tmp_path / "ledger") as ledger:
        fill(ledger)
        before = told(ledger)
    with (tmp_path / "ledger").open("ab") as file:
        file.write(bytes(4096))
    with RolloutLedger(tmp_path / "ledger", 2) as ledger:
        assert told(ledger) == before


class Model:
    """What a ledger should hold, in plain sets."""

    def __init__(self) -> None:
        self.running: dict[int, int] = {}
        self.sampled: dict[int, tuple[int, bytes]] = {}
        self.batches: dict[int, tuple[int, ...]] = {}
        self.done: set[int] = set()
        self.saved = 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), compact_every=st.integers(3, 40))
def test_any_run_with_failures_restarts_and_compactions(
    tmp_path_factory: pytest.TempPathFactory, seed: int, compact_every: int
) -> None:
    """Against a model that is told the same and forgets nothing."""
    draw, model = random.Random(seed), Model()
    path = tmp_path_factory.mktemp("ledger") / "ledger"
    ledger, fresh = RolloutLedger(path, fsync="never"), 0
    for turn in range(80):
        free = [group for group in model.sampled if not any(group in batch for batch in model.batches.values())]
        act = draw.choice(["begin", "begin", "finish", "finish", "again", "drop", "train", "save", "restart"])
        if act == "begin":
            holes = [n for n in range(fresh) if n not in model.done and n not in {**model.running, **model.sampled}]
            group = draw.choice(holes) if holes and draw.random() < 0.5 else fresh
            fresh = max(fresh, group + 1)
            model.running[group] = turn
            ledger.started(group, turn)
        elif act in ("finish", "again", "drop") and model.running:
            group = draw.choice(sorted(model.running))
            version = model.running.pop(group)
            if act == "again":
                ledger.again(group)
            elif act == "drop":
                model.done.add(group)
                ledger.no_signal(group)
            else:
                model.sampled[group] = (version, draw.randbytes(draw.randrange(30)))
                ledger.finished(group, model.sampled[group][1])
        elif act == "train" and len(free) >= 2:
            step = model.saved + len(model.batches) + 1
            model.batches[step] = tuple(draw.sample(sorted(free), 2))
            ledger.train(step, model.batches[step])
        elif act == "save" and model.batches:
            step = draw.choice(sorted(model.batches))
            for number in range(model.saved + 1, step + 1):
                for group in model.batches.pop(number):
                    model.done.add(group)
                    del model.sampled[group]
            model.saved = step
            ledger.saved(step)
        elif act == "restart":
            model.running.clear()
            ledger.close()
            ledger = RolloutLedger(path, model.saved, fsync="never")
        if turn % compact_every == 0:
            ledger.compact()
        state = ledger.state
        assert state.running == model.running
        assert {g: (found.version, ledger.payload(g)) for g, found in state.sampled.items()} == model.sampled
        assert state.batches == model.batches
        assert {n for n in range(fresh) if n in state.done} == model.done
        assert len(state.done) == len(model.done)
        lost = {n for n in range(state.next) if n not in {*model.done, *model.sampled}}
        assert set(state.missing()) == lost
        assert state.next > max({-1, *model.running, *model.sampled, *model.done})
    ledger.close()


def test_nothing_is_begun_finished_or_trained_twice(tmp_path: Path) -> None:
    with RolloutLedger(tmp_path / "ledger") as ledger:
        fill(ledger)
        before = (tmp_path / "ledger").read_bytes()
        refusals: tuple[tuple[Callable[[], None], str], ...] = (
            (lambda: ledger.started(0, 9), "group 0 was begun already"),
            (lambda: ledger.started(6, 9), "group 6 was begun already"),
            (lambda: ledger.finished(6), "group 6 is not being sampled"),
            (lambda: ledger.again(1), "group 1 is not being sampled"),
            (lambda: ledger.no_signal(6), "group 6 is not being sampled"),
            (lambda: ledger.train(4, [6, 7]), "group 7 is not sampled: step 4 cannot train it"),
            (lambda: ledger.train(4, [5, 6]), "group 5 is trained by step 3 already"),
            (lambda: ledger.train(4, [6, 6]), "step 4 names a group twice"),
            (lambda: ledger.train(4, [0, 6]), "group 0 is not sampled"),
            (lambda: ledger.train(5, [6]), "step 5 cannot follow step 3"),
            (lambda: ledger.train(3, [4, 6]), "step 3 was recorded with other groups"),
            (lambda: ledger.saved(4), "a checkpoint of step 4 cannot follow"),
        )
        for refused, says in refusals:
            with pytest.raises(ValueError, match=says):
                refused()
        ledger.train(3, (4, 5))  # repeated as it was
        assert (tmp_path / "ledger").read_bytes() == before


def test_a_checkpoint_that_the_ledger_did_not_hear_of(tmp_path: Path) -> None:
    with RolloutLedger(tmp_path / "ledger") as ledger:
        fill(ledger, steps=3, save_every=9)
    with RolloutLedger(tmp_path / "ledger", 2) as ledger:
        assert told(ledger)[:2] == (2, [0, 4])
        assert ledger.state.batches == {3: (4, 5)}
    with pytest.raises(ValueError, match=r"knows of a checkpoint of step 2, and the run would go on from step 1"):
        RolloutLedger(tmp_path / "ledger", 1)
    with RolloutLedger(tmp_path / "ledger") as ledger:
        assert ledger.state.saved == 2


def test_two_processes_cannot_hold_one_ledger(tmp_path: Path) -> None:
    with RolloutLedger(tmp_path / "ledger") as ledger:
        with pytest.raises(ValueError, match="in use by another process"):
            RolloutLedger(tmp_path / "ledger")
        ledger.compact()
        with pytest.raises(ValueError, match="in use by another process"):
            RolloutLedger(tmp_path / "ledger")
    RolloutLedger(tmp_path / "ledger").close()


def test_another_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("something of somebody's else")
    with pytest.raises(ValueError, match="is not a ledger"):
        RolloutLedger(tmp_path / "ledger")
    assert (tmp_path / "ledger").read_text() == "something of somebody's else"


FORK = multiprocessing.get_context("fork")


def full_disk(path: Path, size: int, done: "Connection[Any, Any]") -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    ledger = RolloutLedger(path)
    try:
        fill(ledger, steps=1000, save_every=5000, size=300)
    except ValueError as error:
        done.send(str(error))
    done.close()


@pytest.mark.parametrize("size", [5000, 5003, 5100, 5200])
def test_full_disk(tmp_path: Path, size: int) -> None:
    """The run stops with the reason; with room again it goes on from all that it was told."""
    mine, theirs = FORK.Pipe(duplex=False)
    child = FORK.Process(target=full_disk, args=(tmp_path / "ledger", size, theirs))
    child.start()
    assert mine.poll(60)
    assert "cannot grow (File too large): free some space and go on with --resume" in mine.recv()
    child.join()
    with RolloutLedger(tmp_path / "ledger") as ledger:
        steps = len(ledger.state.batches)
        assert steps > 3
        assert all(len(ledger.payload(group)) >= 300 for group in range(2 * steps))
        ledger.started(10_000, 1)
        ledger.finished(10_000)
        ledger.train(steps + 1, [10_000])


def squeezed(path: Path, done: "Connection[Any, Any]") -> None:
    """The child: its disk has no room for compactions of the first two checkpoints, for the third it has."""
    real, tries = RolloutLedger.compact, list[bool]()

    def compact(self: RolloutLedger) -> bool:
        free = resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if len(tries) < 2 else free, free))
        try:
            tries.append(real(self))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (free, free))
        return tries[-1]

    RolloutLedger.compact = compact  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ledger = RolloutLedger(path)
        fill(ledger, steps=3, batch=8, ahead=1, save_every=1, size=300_000)
        ledger.close()
    done.send((tries, [str(one.message) for one in said], sorted(file.name for file in path.parent.iterdir())))


def test_a_compaction_without_room_is_put_off(tmp_path: Path) -> None:
    """With a word, once; nothing of it stays on the disk, and a later one makes up for it."""
    mine, theirs = FORK.Pipe(duplex=False)
    child = FORK.Process(target=squeezed, args=(tmp_path / "ledger", theirs))
    child.start()
    theirs.close()
    assert mine.poll(60)
    tries, said, files = mine.recv()
    child.join()
    assert tries == [False, False, True]
    assert len(said) == 1
    assert "is not compacted (File too large) and grows on: free some space" in said[0]
    assert files == ["ledger"]
    assert (tmp_path / "ledger").stat().st_size < 2 * 300_000
    with RolloutLedger(tmp_path / "ledger") as ledger:
        assert ledger.state.saved == 3
        assert len(ledger.payload(24)) > 300_000


def busy(path: Path, ready: "Connection[Any, Any]") -> None:
    ledger = RolloutLedger(path, fsync="never")
    begin = len(ledger.state.batches) + ledger.state.saved
    ready.send(1)
    for step in range(begin + 1, begin + 100_000):
        for group in (2 * step, 2 * step + 1):
            if group not in ledger.state.sampled:
                ledger.started(group, step)
                ledger.finished(group, b"p" * 50)
        ledger.train(step, [2 * step, 2 * step + 1])
        if step % 3 == 0:
            ledger.saved(step)
            ledger.compact()


def test_a_kill_at_twenty_random_moments(tmp_path: Path) -> None:
    """By SIGKILL, often amid a compaction: every moment's file opens, and steps go on without a gap."""
    draw, last = random.Random(5), 0
    for _ in range(20):
        mine, theirs = FORK.Pipe(duplex=False)
        child = FORK.Process(target=busy, args=(tmp_path / "ledger", theirs))
        child.start()
        assert mine.poll(60)
        time.sleep(draw.uniform(0, 0.03))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        with RolloutLedger(tmp_path / "ledger") as ledger:
            state = ledger.state
            steps = state.saved + len(state.batches)
            assert steps >= last
            assert sorted(state.batches) == list(range(state.saved + 1, steps + 1))
            assert state.done.pairs() == ([2, 2 * state.saved + 2] if state.saved else [])
            last = steps
    assert last > 20


def test_a_large_ledger_is_compacted_as_it_grows_and_opened_at_once(tmp_path: Path) -> None:
    """A tenth of what the benchmark writes; no time is asserted, the size is."""
    with RolloutLedger(tmp_path / "ledger", fsync="never") as ledger:
        fill(ledger, steps=250, batch=400, ahead=400, save_every=10, size=20)
    assert (tmp_path / "ledger").stat().st_size < (1 << 20) + 3 * 400 * 12 * 100
    with RolloutLedger(tmp_path / "ledger", 250) as ledger:
        assert ledger.state.done.pairs() == [0, 100_000]
        assert len(ledger.state.sampled) == 400


def test_frames_are_what_the_head_says() -> None:
    assert frame(Kind.AGAIN, number_body(258)).hex() == "08000000" + frame(Kind.AGAIN, number_body(258))[4:8].hex() + (
        "04" + "0201000000000000"
    )

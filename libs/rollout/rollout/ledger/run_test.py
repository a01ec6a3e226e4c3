"""Whole small runs of controller and ledger that are killed, by SIGKILL, at every named point and at random moments.

The run is a loop over the two: it samples in an order of its own, trains by adding numbers up, and writes checkpoints
whole or not at all. A log that knows nothing of the ledger says what each step was trained on; a start from a
checkpoint forgets the steps after it, as the weights do. What is left must be every group once.
"""

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout.control.settings import StalenessSettings
from rollout.control.staleness import (
    Begin,
    ControlState,
    Failed,
    Finished,
    NoSignal,
    StalenessController,
    StartedGroup,
    Sync,
    Synced,
    SyncFailed,
    Train,
    Trained,
)
from rollout.ledger.ledger import RolloutLedger

FORK = multiprocessing.get_context("fork")
SETTINGS = StalenessSettings(3, 14, staleness_threshold=1.0, parameter_sync_step=2, partial_rollout=True)
SAVE_EVERY = 4
POINTS = ("begun", "finished", "no_signal", "again", "train", "saved", "compact", "checkpoint")


def checkpoint_of(folder: Path) -> dict[str, int]:
    path = folder / "checkpoint.json"
    found: dict[str, int] = json.loads(path.read_text()) if path.is_file() else {"step": 0, "sum": 0}
    return found


def save(folder: Path, step: int, total: int) -> None:
    part = folder / "checkpoint.part"
    part.write_text(json.dumps({"step": step, "sum": total}))
    os.replace(part, folder / "checkpoint.json")


def note(folder: Path, line: dict[str, Any]) -> None:
    with (folder / "independent.log").open("a") as file:
        file.write(json.dumps(line) + "\n")


class Points:
    """Named calls of a process, counted, which dies at `kill_at`: (point, its number, "before" or "after")."""

    def __init__(self, kill_at: tuple[str, int, str] | None) -> None:
        self.kill_at = kill_at
        self.calls = Counter[str]()

    def __call__(self, point: str, act: Callable[..., Any], *arguments: Any) -> Any:
        self.calls[point] += 1
        self._reach(point, "before")
        result = act(*arguments)
        self._reach(point, "after")
        return result

    def _reach(self, point: str, when: str) -> None:
        if (point, self.calls[point], when) == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def play(folder: Path, seed: int, kill_at: tuple[str, int, str] | None = None, pace: float = 0.0) -> None:
    """The child: go on from the checkpoint to the end; see `Points` for `kill_at`."""
    draw, at = random.Random(seed), Points(kill_at)
    start = checkpoint_of(folder)
    note(folder, {"from": start["step"]})
    ledger = RolloutLedger(folder / "ledger", start["step"], fsync="never")
    total, step = start["sum"], start["step"]

    def train(number: int, groups: Sequence[int]) -> None:
        nonlocal total, step
        payloads = [json.loads(ledger.payload(group)) for group in groups]
        assert [payload["group"] for payload in payloads] == list(groups)
        total += sum(payload["group"] for payload in payloads)
        step = number
        note(folder, {"step": number, "groups": list(groups)})
        if number % SAVE_EVERY == 0 or number == SETTINGS.total_steps:
            at("checkpoint", save, folder, number, total)
            at("saved", ledger.saved, number)
            at("compact", ledger.compact)

    for number, groups in sorted(dict(ledger.state.batches).items()):
        train(number, groups)
    ready = tuple(StartedGroup(g, s.version) for g, s in ledger.state.sampled.items() if g not in ledger.state.taken)
    synced = step if step == SETTINGS.total_steps else step - step % SETTINGS.parameter_sync_step
    state = ControlState(step, synced, ledger.state.next, tuple(ledger.state.missing()), (), ready)
    controller = StalenessController(SETTINGS, state)
    todo, sampling = list(controller.begin()), list[int]()
    while not controller.done:
        time.sleep(pace)
        if todo:
            decision = todo.pop(0)
            if isinstance(decision, Begin):
                at("begun", ledger.started, decision.group, decision.version)
                sampling.append(decision.group)
            elif isinstance(decision, Train):
                at("train", ledger.train, decision.step, decision.groups)
                train(decision.step, decision.groups)
                todo += controller.handle(Trained())
            else:
                assert isinstance(decision, Sync)
                todo += controller.handle(SyncFailed() if draw.random() < 0.2 else Synced())
        else:
            group = sampling.pop(draw.randrange(len(sampling)))
            if draw.random() < 0.1:
                at("again", ledger.again, group)
                todo += controller.handle(Failed(group))
            elif draw.random() < 0.2:
                note(folder, {"no signal": group})
                at("no_signal", ledger.no_signal, group)
                todo += controller.handle(NoSignal(group))
            else:
                at("finished", ledger.finished, group, json.dumps({"group": group}).encode())
                todo += controller.handle(Finished(group))
    ledger.close()


def end_of(folder: Path, *arguments: Any, after: float | None = None, **options: Any) -> int:
    child = FORK.Process(target=play, args=(folder, *arguments), kwargs=options)
    child.start()
    if after is not None:
        time.sleep(after)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
    child.join(120)
    assert child.exitcode is not None
    return child.exitcode


def assert_nothing_lost(folder: Path) -> None:
    steps: dict[int, list[int]] = {}
    dropped: set[int] = set()
    for line in map(json.loads, (folder / "independent.log").read_text().splitlines()):
        if "from" in line:
            steps = {step: groups for step, groups in steps.items() if step <= line["from"]}
        elif "no signal" in line:
            dropped.add(line["no signal"])
        else:
            assert line["step"] == len(steps) + 1
            steps[line["step"]] = line["groups"]
    trained = [group for groups in steps.values() for group in groups]
    assert len(steps) == SETTINGS.total_steps
    assert len(set(trained)) == len(trained) == SETTINGS.total  # duplicated = 0
    assert set(range(max(trained))) - set(trained) <= dropped  # skipped = 0
    assert checkpoint_of(folder) == {"step": SETTINGS.total_steps, "sum": sum(trained)}


def test_a_run_that_nobody_kills(tmp_path: Path) -> None:
    assert end_of(tmp_path, 0) == 0
    assert_nothing_lost(tmp_path)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_every_named_point(tmp_path: Path, point: str, when: str) -> None:
    """At the first, the second, the third, ... time that the run comes by; then it goes on to its end."""
    for number in (1, 2, 3, 4, 7, 12, 23, 60):
        folder = tmp_path / str(number)
        folder.mkdir()
        code = end_of(folder, number, kill_at=(point, number, when))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        assert end_of(folder, number + 100) == 0
        assert_nothing_lost(folder)
    assert number > 3


def test_kills_at_twenty_seeded_random_moments_of_one_run(tmp_path: Path) -> None:
    draw, killed = random.Random(3), 0
    for number in range(20):
        killed += end_of(tmp_path, number, pace=0.02, after=draw.uniform(0.02, 0.3)) == -signal.SIGKILL
    assert killed >= 5
    assert end_of(tmp_path, 99) == 0
    assert_nothing_lost(tmp_path)

"""Environments in processes: what they do to their process ends no other episode, and sampling goes on."""

import asyncio
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout import Chat, Episode, Sampling, Score, TaskRow, run_group
from rollout.environments.processes.messages import describe, pack_messages, rebuild, unpack_messages
from rollout.environments.processes.pool import EnvironmentProcesses
from rollout.environments.processes.resident import resident_bytes
from rollout.native.engine import NativeEngine
from rollout.testing import ScriptedEngine
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.faulty_environment import Faulty, SlowFaulty
from rollout.testing.model import tiny_model
from seqpack.extensions.load_object import load_object

TOKENIZER = tiny_tokenizer()
CHAT = Chat(TOKENIZER)
SAYS = [*TOKENIZER("ok", add_special_tokens=False)["input_ids"], CHAT.end_of_turn_id]


@pytest.fixture(scope="module")
def shared() -> Iterator[EnvironmentProcesses]:
    pool = EnvironmentProcesses(1, stall_seconds=2.5)
    yield pool
    pool.close()


def play(pool: EnvironmentProcesses, factory: Any = Faulty, size: int = 4, **data: Any) -> list[Episode]:
    engine = ScriptedEngine(lambda prompt, turn: SAYS)
    row = TaskRow("a", data)
    return asyncio.run(run_group(pool.wrap(factory), engine, CHAT, Sampling(max_new_tokens=8), size=size, row=row))


def test_siblings_share_a_process_that_is_not_the_runs(shared: EnvironmentProcesses) -> None:
    episodes = play(shared)
    assert [e.score for e in episodes] == [Score(1.0)] * 4, [e.error for e in episodes]
    assert len({e.metrics["pid"] for e in episodes}) == 1
    assert episodes[0].metrics["pid"] != os.getpid()
    assert [e.score for e in play(shared, turns=[0.5, 2])] == [Score(1.0, turn_rewards=(0.5, 2.0))] * 4


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        ("block", "step() of Faulty gave no answer within 0.5 s"),
        ("exit", "ended its process (exit code 3)"),
        ("hold", "said nothing for 2.5 s"),
        ("stop", "said nothing for 2.5 s"),
        ("none", "step() raised SystemExit: 4"),
    ],
)
def test_whatever_one_does_its_siblings_are_scored(do: str, reason: str, shared: EnvironmentProcesses) -> None:
    episodes = play(shared, do=do, who=[2], seconds=0.1)
    assert reason in (episodes[2].error or "")
    assert [e.score for i, e in enumerate(episodes) if i != 2] == [Score(1.0)] * 3, [e.error for e in episodes]
    assert all(e.score for e in play(shared))  # another process has taken its place


def test_what_environments_compute_costs_sampling_nothing() -> None:
    """The run's CPU time a sampled token beside environments that compute, and beside such that wait as long while
    processes burn both cores: a busy core makes either dearer. In threads the environments' own time counts."""
    engine = NativeEngine(tiny_model(vocab=len(TOKENIZER)))
    sampling = Sampling(max_new_tokens=64, seed=1)

    def cost(pool: EnvironmentProcesses, **data: Any) -> float:
        start = time.process_time()
        group = run_group(
            pool.wrap(SlowFaulty), engine, CHAT, sampling, size=4, row=TaskRow("a", {"who": [*range(4)], **data})
        )
        episodes = asyncio.run(group)
        assert all(e.score for e in episodes), episodes
        return (time.process_time() - start) / sum(e.sampled for e in episodes)

    def beside_burning(pool: EnvironmentProcesses) -> float:
        burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
        try:
            return cost(pool, seconds=0.2)
        finally:
            for process in burning:
                process.kill()
                process.wait()

    ratios = []
    for count in (2, 0):
        pool = EnvironmentProcesses(count)
        cost(pool)  # the processes start
        costs = [(cost(pool, do="burn"), beside_burning(pool)) for _ in range(3)]
        ratios.append(statistics.median(computing / waiting for computing, waiting in costs))
        pool.close()
    print("in processes, in threads:", ratios)
    assert ratios[0] < 1.3
    assert ratios[1] > 1.3


def test_one_that_eats_memory_is_killed_and_replaced() -> None:
    pool = EnvironmentProcesses(1, memory_gib=1.0)
    episodes = play(pool, SlowFaulty, do="eat", who=[2])
    assert re.search(r"took 1\.\d\d GiB of memory, 1\.00 are its limit", episodes[2].error or ""), episodes[2].error
    assert [e.score for i, e in enumerate(episodes) if i != 2] == [Score(1.0)] * 3, [e.error for e in episodes]
    assert all(e.score for e in play(pool))
    pool.close()


def test_memory_of_descendants_counts() -> None:
    code = "import subprocess, sys; x = bytearray(64 << 20); subprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = "x = bytearray(64 << 20); print('there', flush=True); input()"
    before = resident_bytes(os.getpid())
    with subprocess.Popen([sys.executable, "-c", code, child], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        assert 128 << 20 < resident_bytes(parent.pid) < 192 << 20
        assert resident_bytes(os.getpid()) - before > 128 << 20
        parent.communicate(b"\n")
    assert resident_bytes(parent.pid) == 0


def test_a_working_directory_is_its_processs_own(shared: EnvironmentProcesses) -> None:
    before = Path.cwd()
    assert all(e.score for e in play(shared, do="chdir", who=[0]))
    assert Path.cwd() == before


def test_what_an_environment_started_ends_with_its_process() -> None:
    pool = EnvironmentProcesses(1)
    (episode,) = play(pool, size=1, do="fork", who=[0])
    child = int((episode.error or "").rpartition(" ")[2])
    pool.close()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text():
            return
        time.sleep(0.1)
    pytest.fail("the child lives")


def test_a_sub_agent_speaks_through_the_border(shared: EnvironmentProcesses) -> None:
    (episode,) = play(shared, size=1, do="speak", who=[0])
    assert episode.score == Score(1.0), episode.error
    assert [s.agent for s in episode.segments] == ["", "judge"]
    assert sum(s.sampled for s in episode.segments) == 3 * len(SAYS)


def test_a_class_of_a_users_file_is_found(shared: EnvironmentProcesses, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from rollout.testing.faulty_environment import Faulty\nclass Mine(Faulty): pass\n")
    assert all(e.score for e in play(shared, load_object(f"{file}:Mine", "environment")))


def test_what_cannot_be_sent_is_said(shared: EnvironmentProcesses) -> None:
    class Local(Faulty):
        pass

    with pytest.raises(ValueError, match=r"Local can't be sent .* define it at the top .* --environment-processes 0"):
        shared.wrap(Local)
    with pytest.warns(RuntimeWarning, match="played in threads of the run's process"):
        assert EnvironmentProcesses().wrap(Local) is Local
    assert EnvironmentProcesses(0).wrap(Faulty) is Faulty
    assert "give plain data" in (play(shared, size=1, do=object())[0].error or "")


def test_a_class_is_refused_by_its_share_and_comes_back(
    shared: EnvironmentProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.environments.processes.pool.WINDOW", 8)
    shared.ends.clear()
    play(shared, size=6, do="block", who=[*range(6)])
    refused = play(shared, size=2)
    assert "of its last 8 episodes hung or died" in (refused[0].error or ""), refused[0]
    play(shared, size=8)
    assert all(e.score for e in play(shared))


def test_a_factory_crosses_the_border_by_its_names() -> None:
    data: dict[Any, Any] = {1: ("x", [None, b"y"])}
    word = functools.partial(TaskRow, "a", data=data)
    assert rebuild(json.loads(json.dumps(describe(word))))() == word()
    assert rebuild(describe(TaskRow("b", {"n": 2}))) == TaskRow("b", {"n": 2})
    for wrong in (lambda: None, object(), np.zeros(2)):
        with pytest.raises(TypeError):
            describe(wrong)


def test_messages_cross_the_border_as_they_are() -> None:
    messages = ({"role": "user", "content": [{"type": "image", "image": b"\x00\xff"}, {"type": "text", "text": "a"}]},)
    assert unpack_messages(pack_messages(messages)) == messages
    with pytest.raises(TypeError, match="a object in a message"):
        pack_messages(({"role": "user", "content": object()},))

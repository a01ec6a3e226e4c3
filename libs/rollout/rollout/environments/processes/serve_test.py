"""Environments that a server plays, over TCP on loopback: the same episodes, and the same ends of bad ones."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout import Chat, Episode, Sampling, Score, TaskRow, run_group
from rollout.environments.environment import EpisodeContext
from rollout.environments.processes.pool import EnvironmentProcesses
from rollout.environments.processes.transports import KEY, read_address
from rollout.testing import ScriptedEngine
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.faulty_environment import Faulty, SlowFaulty

TOKENIZER = tiny_tokenizer()
CHAT = Chat(TOKENIZER)
SAYS = [*TOKENIZER("ok", add_special_tokens=False)["input_ids"], CHAT.end_of_turn_id]
SECRET = "a secret of the tests"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    log = tmp_path_factory.mktemp("server") / "log"
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-m", "rollout.environments.processes.serve", "--listen", "127.0.0.1:0"]
    with (
        pytest.MonkeyPatch.context() as patch,
        log.open("w") as said,
        subprocess.Popen(
            [*command, "--memory-gib", "1"],
            env={**os.environ, "PYTHONPATH": paths, KEY: SECRET},
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        ) as process,
    ):
        patch.setenv(KEY, SECRET)
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], log
        process.kill()


def play(pool: EnvironmentProcesses, factory: Any = Faulty, size: int = 4, **data: Any) -> list[Episode]:
    engine = ScriptedEngine(lambda prompt, turn: SAYS)
    row = TaskRow("a", data)
    return asyncio.run(run_group(pool.wrap(factory), engine, CHAT, Sampling(max_new_tokens=8), size=size, row=row))


def test_a_server_plays_what_this_machine_does_not(server: tuple[str, Path]) -> None:
    address, log = server
    pool = EnvironmentProcesses(2, stall_seconds=5.0, servers=[address])
    episodes = play(pool)
    assert [e.score for e in episodes] == [Score(1.0)] * 4, [e.error for e in episodes]
    pids = {int(e.metrics["pid"]) for e in episodes}
    assert len(pids) == 2
    assert os.getpid() not in {parent_of(pid) for pid in pids}  # they are children of the server
    (spoken,) = play(pool, size=1, do="speak", who=[0])
    assert [s.agent for s in spoken.segments] == ["", "judge"], spoken.error
    pool.close()
    for pid in pids:
        wait_for_end(pid)  # its run is gone, so is what it played
    wait_for_words(log, "its run is gone")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for_end(pid: int) -> None:
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} lives")


def wait_for_words(log: Path, words: str) -> None:
    for _ in range(100):
        if words in log.read_text():
            return
        time.sleep(0.1)
    pytest.fail(log.read_text())


@pytest.mark.parametrize(
    ("factory", "do", "reason", "logged"),
    [
        (Faulty, "exit", "ended its process on 127.0.0.1:", "it ended (exit code 3)"),
        (Faulty, "stop", "said nothing for 2.5 s", "its run is gone"),
        (Faulty, "block", "step() of Faulty gave no answer within 0.5 s", ""),
        (SlowFaulty, "eat", "ended its process on 127.0.0.1:", "GiB of memory, 1.00 are its limit"),
    ],
)
def test_whatever_one_does_its_siblings_are_scored(
    factory: type[Faulty], do: str, reason: str, logged: str, server: tuple[str, Path]
) -> None:
    address, log = server
    pool = EnvironmentProcesses(1, stall_seconds=2.5, servers=[address])
    episodes = play(pool, factory, size=3, do=do, who=[2])
    assert reason in (episodes[2].error or ""), episodes[2]
    assert [e.score for e in episodes[:2]] == [Score(1.0)] * 2, [e.error for e in episodes]
    assert all(e.score for e in play(pool))
    pool.close()
    wait_for_words(log, logged)


def test_another_server_is_asked_where_one_is_gone(server: tuple[str, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    pool = EnvironmentProcesses(1, servers=[f"127.0.0.1:{port}", server[0]])
    assert all(e.score for e in play(pool))
    pool.close()
    pool = EnvironmentProcesses(1, servers=[f"127.0.0.1:{port}"])
    assert f"the environment server 127.0.0.1:{port}: " in (play(pool, size=1)[0].error or "")


def test_who_has_no_key_gets_nothing(server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    address, log = server
    with (
        socket.create_connection(read_address(address)) as silent,
        socket.create_connection(read_address(address)) as one,
    ):
        one.sendall(b'\x00\x00\x00\x20{"id": 0, "call": "open", "episode"}')
        one.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            while one.recv(4096):  # a challenge, and then the end
                pass
        pool = EnvironmentProcesses(1, servers=[address])
        assert all(e.score for e in play(pool))  # while a stranger says nothing
        pool.close()
        silent.close()
    monkeypatch.setenv(KEY, "another secret of tests")
    pool = EnvironmentProcesses(1, servers=[address])
    with pytest.raises(ValueError, match=f"has another {KEY}"):
        asyncio.run(pool.place("Faulty", EpisodeContext("a")))
    assert "refused a connection" in log.read_text()
    monkeypatch.setenv(KEY, "short")
    with pytest.raises(ValueError, match="need a secret of 16 characters"):
        EnvironmentProcesses(1, servers=[address])
    monkeypatch.setenv(KEY, SECRET)
    for wrong in ("nowhere", ":1", "host:x", "host:70000"):
        with pytest.raises(ValueError, match="is HOST:PORT"):
            EnvironmentProcesses(1, servers=[wrong])
    with pytest.raises(ValueError, match="number of processes"):
        EnvironmentProcesses(servers=[address])

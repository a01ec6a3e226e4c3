"""Ranks: results, failures with their traceback, no process left behind, the environment as it was."""

import multiprocessing
import multiprocessing.context
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engines.launch import RankError, RankRefusedError, _first_error, launch, under_torchrun


@pytest.fixture
def spawned() -> Iterator[None]:
    """Spawn as a user's run does; other tests start processes as pytest_main.py has them, faster."""
    with pytest.MonkeyPatch.context() as patch:
        contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
        patch.setitem(contexts, "spawn", multiprocessing.context.SpawnContext())
        yield


def total(start: float) -> tuple[float, int, int]:
    value = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(value)
    return value.item(), dist.get_world_size(), os.getpid()


def fail_on_one(folder: Path) -> None:
    (folder / str(dist.get_rank())).write_text(str(os.getpid()))
    if dist.get_rank() == 1:
        raise KeyError("the culprit")
    dist.barrier()  # waits for rank 1 for ever


def die_silently() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    time.sleep(60)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "zombie" not in open(f"/proc/{pid}/status").read()


def test_one_rank_runs_here_and_leaves_no_group() -> None:
    before = dict(os.environ)
    value, world, pid = launch(total, (5,))
    assert (value, world, pid) == (5.0, 1, os.getpid())
    assert not dist.is_initialized()
    assert dict(os.environ) == before


def refuse_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("raise --steps to 3")
    dist.barrier()


def test_a_refusal_of_a_rank_is_its_text_and_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"^raise --steps to 3 \(told by rank 1\)$") as caught:
        launch(refuse_on_one, (), world_size=2)
    assert isinstance(caught.value, RankRefusedError)
    assert isinstance(caught.value, RankError)
    assert "in refuse_on_one" in caught.value.traceback


@pytest.mark.usefixtures("spawned")
def test_two_ranks_talk_and_rank_0_answers() -> None:
    value, world, pid = launch(total, (5,), world_size=2)
    assert (value, world) == (11.0, 2)
    assert pid != os.getpid()
    assert not alive(pid)


def test_a_failing_rank_ends_the_others(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*fail_on_one.*KeyError: 'the culprit'"):
        launch(fail_on_one, (tmp_path,), world_size=2)
    assert time.monotonic() - began < 60
    assert not any(alive(int(path.read_text())) for path in tmp_path.iterdir())


def test_a_rank_that_dies_silently_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 died with exit code 7"):
        launch(die_silently, world_size=2)


def stop_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def test_a_rank_that_is_stopped_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 said nothing for 8 s; the stacks"):
        launch(stop_one, world_size=2, stall_seconds=8.0)  # the other one waits longer, and beats


def hold_the_interpreter() -> None:
    if dist.get_rank() == 1:
        re.search(r"(a+)+$", "a" * 60 + "b")
    dist.barrier()


def test_a_rank_that_hangs_says_where(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError, match="rank 1 said nothing for 8 s"):
        launch(hold_the_interpreter, world_size=2, stall_seconds=8.0)
    assert "in hold_the_interpreter" in capfd.readouterr().err


def fault(number: int) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    time.sleep(60)


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV])
def test_a_fault_of_native_code_says_where_it_was(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        RankError, match=rf"rank 1 died with exit code -{number} \(SIG(ABRT|SEGV)\) and said nothing; the stacks"
    ):
        launch(fault, (number,), world_size=2)
    stderr = capfd.readouterr().err
    assert "Fatal Python error" in stderr
    assert "in fault" in stderr


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "-9 (SIGKILL) and said nothing; memory may have run out"),
        (signal.SIGTERM, "-15 (SIGTERM) and said nothing"),
        (signal.SIGRTMIN + 1, f"-{signal.SIGRTMIN + 1} and said nothing"),
    ],
)
def test_another_signal_is_named_where_it_has_a_name(number: int, told: str) -> None:
    with pytest.raises(RankError) as caught:
        launch(fault, (number,), world_size=2)
    assert str(caught.value) == f"rank 1 died with exit code {told}"


def test_a_lost_peer_is_named_before_the_error_that_it_caused() -> None:
    context = multiprocessing.get_context("spawn")
    lost = context.Process(target=signal.raise_signal, args=(signal.SIGKILL,))
    lost.start()
    here, there = context.Pipe()
    there.close()
    error = _first_error(0, (1.0, "ConnectionError: closed by peer", None), {here: 1}, [None, lost])
    assert str(error).startswith(
        "rank 1 died with exit code -9 (SIGKILL) and said nothing; memory may have run out; then rank 0 failed:"
    )
    assert str(error).endswith("ConnectionError: closed by peer")


def tell_pid(queue: Any) -> None:
    queue.put(os.getpid())


def start_a_process() -> tuple[int, int, int | None]:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=tell_pid, args=(queue,), daemon=True)
    process.start()
    pid = queue.get(timeout=60)
    process.join()
    parent = multiprocessing.parent_process()
    assert parent is not None
    return pid, os.getpid(), parent.pid


@pytest.mark.usefixtures("spawned")
def test_a_rank_may_start_processes_of_its_own() -> None:
    pid, rank, parent = launch(start_a_process, world_size=2)
    assert len({pid, rank, parent}) == 3
    assert parent == os.getpid()


def test_no_orphans_when_this_process_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, sys, time
            from pathlib import Path
            import torch.distributed as dist
            from engines.launch import launch

            def work():
                Path({str(tmp_path)!r}, f"pid{{dist.get_rank()}}").write_text(str(os.getpid()))
                time.sleep(120)

            if __name__ == "__main__":
                launch(work, world_size=2)
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, str(script)], env=environment)
    try:
        pids = _wait_for_two(tmp_path)
    finally:
        process.kill()
        process.wait()
    for _ in range(100):
        if not any(alive(pid) for pid in pids):
            return
        time.sleep(0.1)
    raise AssertionError("the ranks outlived the process that launched them")


def _wait_for_two(folder: Path) -> list[int]:
    for _ in range(600):
        pids = [path.read_text() for path in folder.glob("pid*")]
        if len(pids) == 2 and all(pids):
            return [int(pid) for pid in pids]
        time.sleep(0.1)
    raise AssertionError("the ranks did not start")


def test_joins_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert under_torchrun()
    assert launch(total, (3,))[:2] == (3.0, 1)
    with pytest.raises(ValueError, match="torchrun started 1"):
        launch(total, (3,), world_size=2)


def test_bad_world_size() -> None:
    with pytest.raises(ValueError, match="world_size"):
        launch(total, (1,), world_size=0)

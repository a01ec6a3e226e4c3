"""Runs that are stopped from outside: by SIGTERM, and by a rank of a real torchrun that does not go on."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from apps.common.run.checkpoints import last_checkpoint
from apps.common.testing.process_kills import wait_for_content

SECONDS = 240.0
FLAGS = ["--stall-seconds", "6", "--batch-size", "8", "--run-dir"]


@contextmanager
def started(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that has done a step."""
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [sys.executable, "-m", *words, *FLAGS, str(folder)], env=os.environ | variables | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        wait_for_content(folder / "metrics.jsonl", SECONDS)
        yield process
    finally:
        process.kill()
        process.wait()


def test_sigterm_ends_a_run_with_a_checkpoint_that_can_be_gone_on_with(tmp_path: Path) -> None:
    with started(tmp_path, "apps.sft.main", "--max-steps", "100000") as run:
        run.terminate()
        text, _ = run.communicate(timeout=SECONDS)
    assert run.returncode == 128 + signal.SIGTERM, text
    found = re.search(r"SIGTERM: stopped after step (\d+); --resume", text)
    assert found is not None, text
    checkpoint = last_checkpoint(tmp_path)
    assert checkpoint is not None
    assert int(found[1]) in checkpoint
    assert (tmp_path / "report.html").is_file()
    with started(tmp_path, "apps.sft.main", "--resume", "--max-steps", str(int(found[1]) + 1)) as rest:
        text, _ = rest.communicate(timeout=SECONDS)
    assert rest.returncode == 0, text
    assert (tmp_path / "export").is_dir()


def test_a_stopped_rank_ends_the_run_that_torchrun_started(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launcher = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    program = ["-m", "apps.sft.main", "--max-steps", "100000"]
    with started(tmp_path, "torch.distributed.run", *launcher, *program) as run:
        stopped = _rank(run.pid, 1)
        os.kill(stopped, signal.SIGSTOP)
        text, _ = run.communicate(timeout=SECONDS)
    assert run.returncode != 0, text
    assert re.search(rf"rank 1 \(process {stopped} on \S+\) said nothing for 6 s, as rank 0 noticed", text), text
    assert not Path(f"/proc/{stopped}").exists()
    assert (tmp_path / "report.html").is_file(), text


def _rank(launcher: int, rank: int) -> int:
    """Return the process of a rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    named = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in children}
    (found,) = (pid for pid, names in named.items() if b"RANK=%d" % rank in names)
    return int(found)

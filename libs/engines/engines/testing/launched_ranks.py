"""Groups of `stalled_ranks` that an outer launcher starts, as processes: torchrun, or none, as under srun."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engines.testing import stalled_ranks

PROGRAM = str(Path(stalled_ranks.__file__))
SECONDS = 150.0


class Ranks:
    """Processes of a launcher and what they wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[subprocess.Popen[bytes]]()
        paths = os.pathsep.join(path for path in sys.path if path)
        self.variables = {**os.environ, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

    def torchrun(self, case: str, rank: int, ranks: int = 2) -> None:
        """Start the ranks by torchrun."""
        words = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1"]
        self._start([*words, "--master-port", str(_port()), PROGRAM, case, str(rank), str(self.folder)], {})

    def separate(self, case: str, rank: int, ranks: int = 2) -> None:
        """Start the ranks each by itself."""
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port()), "WORLD_SIZE": str(ranks)}
        for number in range(ranks):
            variables = {**shared, "RANK": str(number), "LOCAL_RANK": str(number)}
            self._start([PROGRAM, case, str(rank), str(self.folder)], variables)

    def _start(self, words: list[str], variables: dict[str, str]) -> None:
        log = open(self.folder / f"log{len(self.processes)}", "wb")  # noqa: SIM115  the process has it
        with log:
            process = subprocess.Popen(
                [sys.executable, *words], env={**self.variables, **variables}, stdout=log, stderr=log
            )
        self.processes.append(process)

    def wait(self) -> tuple[list[int], str]:
        """Return how the processes ended, and all that they wrote."""
        end = time.monotonic() + SECONDS
        try:
            codes = [process.wait(end - time.monotonic()) for process in self.processes]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"no end:\n{self.text}") from error
        return codes, self.text

    @property
    def text(self) -> str:
        """What they wrote."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("log*")))

    def pids(self) -> list[int]:
        """Return the numbers of the ranks' processes, once they are at work."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            found = [path.read_text() for path in sorted(self.folder.glob("pid*"))]
            if len(found) == 2 and all(found):
                return [int(pid) for pid in found]
            time.sleep(0.1)
        raise AssertionError(f"the ranks did not start:\n{self.text}")


@contextmanager
def launched_ranks(folder: Path) -> Iterator[Ranks]:
    """Yield a launcher that ends with the block, and see that its ranks have ended too."""
    started = Ranks(folder)
    try:
        yield started
    finally:
        for process in started.processes:
            process.kill()
            process.wait()
    for path in folder.glob("pid*"):
        assert not _alive(int(path.read_text())), started.text


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _alive(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False

"""A command of an app in a process of its own, whose output is kept: for tests of `--launch ray`."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


class Command:
    """A running command: a module and its arguments, in a folder."""

    def __init__(self, words: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None) -> None:
        paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path if path)
        own = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as this
        self._process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=folder,
            env={**own, "PYTHONPATH": paths, **(variables or {})},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    @property
    def text(self) -> str:
        """What it has written."""
        return os.pread(self._output.fileno(), 1 << 24, 0).decode(errors="replace")

    def send(self, number: int) -> None:
        """Send it a signal, and to no process of its own."""
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int:
        """Wait for its end, and return its exit status."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            self._process.kill()
            raise AssertionError(f"no end within {seconds:.0f} s:\n{self.text}") from error

    def wait_for(self, met: Callable[[], bool], seconds: float) -> None:
        """Wait until something holds while it runs."""
        end = time.monotonic() + seconds
        while not met():
            assert self._process.poll() is None, self.text
            assert time.monotonic() < end, self.text
            time.sleep(0.1)

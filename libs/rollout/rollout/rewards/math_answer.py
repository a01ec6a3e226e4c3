r"""Rewards for answers in mathematics: \boxed{\frac{1}{2}} is 0.5, and \boxed{18\text{ dollars}} is 18.

math-verify (the extra `tessera-rollout[math]`) decides, in processes of its own that can be ended; see `math_worker`.
"""

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

from rollout.chat.messages import Reply
from rollout.errors import EpisodeFailed
from rollout.extras import missing_extra_message
from rollout.rewards.boxed import boxed
from rollout.tools.tool import ToolResult
from rollout.tools.workers import waiting

MAX_CHARACTERS = 2000  # most characters of an answer; a longer one is not read
MAX_WAIT = 3600.0  # seconds for a free process; every comparison ends, so that a queue of hostile answers moves on
_FAILURES = 3  # comparisons of two answers that can't be told, after which a group's others count as different
_START_SECONDS = 60.0
_PATIENCE = 10  # how many times its seconds of computing a comparison may last on a busy machine


class MathChecker:
    """Comparison of answers in up to `processes` processes, each started when first needed and again where it ended.

    A comparison that computes for more than `timeout` seconds counts as unequal: a model's answer has to be shown
    equal. The clock starts when a process is free: a wait for one counts neither for the answer nor for the reward that
    asks (`rollout.tools.workers.waiting`). Blocking, and safe to use from several threads. Raises ValueError where
    math-verify is not installed.
    """

    def __init__(self, processes: int = 2, timeout: float = 5.0) -> None:
        if processes < 1:
            raise ValueError(f"processes must be at least 1, got {processes}")
        if not timeout > 0:
            raise ValueError(f"timeout must be more than 0 seconds, got {timeout}")
        if find_spec("math_verify") is None:
            raise ValueError(missing_extra_message("math rewards need math-verify", "math"))
        self.timeout = timeout
        self._free = threading.Semaphore(processes)
        self._idle: list[_Process] = []

    def equal(self, answer: str, found: str) -> bool:
        """Return whether `found`, by a model, is the same as `answer`.

        Raises EpisodeFailed, to be tried again, where no process starts or none is free within MAX_WAIT seconds.
        """
        return bool(self._compared(answer, found)["equal"])

    def classes(self, answers: Sequence[str]) -> list[int]:
        """Return the number of each answer's class: those that `equal` holds to be the same, in either direction, and
        what is the same as one of them. It depends on no order.

        One that cannot be read in time is alone, and after some comparisons that end in no time the others differ. Each
        answer is read once; of n different ones at most n^2 are compared.
        """
        texts = sorted({_plain(answer) for answer in answers})
        numbers = {answer: texts.index(_plain(answer)) for answer in sorted(set(answers))}
        able = [one for one in numbers if len(one) <= MAX_CHARACTERS and "ended" not in self._verdict(one, one)]
        failures = 0
        for one, other in itertools.combinations(able, 2):
            if numbers[one] == numbers[other] or failures >= _FAILURES:
                continue
            verdicts = [self._compared(one, other), self._compared(other, one)]
            failures += any("ended" in verdict for verdict in verdicts)
            if any(verdict["equal"] for verdict in verdicts):
                low, high = sorted((numbers[one], numbers[other]))
                numbers = {answer: low if number == high else number for answer, number in numbers.items()}
        return [numbers[answer] for answer in answers]

    def _compared(self, answer: str, found: str) -> dict[str, Any]:
        """Return whether two answers are `equal`, by their texts where those tell; see `_verdict`."""
        if _plain(answer) == _plain(found):
            return {"equal": True}
        if max(len(answer), len(found)) > MAX_CHARACTERS:
            return {"equal": False}
        return self._verdict(answer, found)

    def _verdict(self, answer: str, found: str) -> dict[str, Any]:
        """Return what a process says of two answers: `equal`, and `ended` where it took too long or too much memory."""
        with waiting():
            if not self._free.acquire(timeout=MAX_WAIT):
                raise EpisodeFailed(f"no process that compares answers came free in {MAX_WAIT:g} s", retryable=True)
        try:
            with waiting():
                process = self._process()
            verdict = process.ask({"answer": answer, "found": found}, _PATIENCE * self.timeout)
            if verdict is None:
                process.close()
                return {"equal": False, "ended": "it gave no response"}
            self._idle.append(process)
            return verdict
        finally:
            self._free.release()

    def _process(self) -> "_Process":
        try:
            return self._idle.pop()
        except IndexError:
            return _Process(self.timeout)

    def close(self) -> None:
        """End the processes."""
        while self._idle:
            self._idle.pop().close()


def math_answer(answer: str, checker: MathChecker | None = None) -> "MathAnswer":
    r"""Return a reward of 1.0 when the answer in the reply's \boxed{...} equals this one (LaTeX), else 0.0."""
    return MathAnswer(answer, checker or _shared())


class MathAnswer:
    """The reward function of `math_answer`."""

    def __init__(self, answer: str, checker: MathChecker) -> None:
        self.answer, self.checker = answer, checker

    def __call__(self, reply: Reply, results: Sequence[ToolResult]) -> float:
        """Score a reply; blocking."""
        del results
        answer = boxed(reply.content)
        return float(answer is not None and self.checker.equal(self.answer, answer))


@cache
def _shared() -> MathChecker:
    return MathChecker()


def _plain(text: str) -> str:
    return "".join(text.split())


class _Process:
    """One `math_worker`, with a line of JSON for each request."""

    def __init__(self, seconds: float) -> None:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from rollout.rewards.math_worker import main; main({seconds!r})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}, start_new_session=True,
        )  # fmt: skip
        if self._line(_START_SECONDS) is None:
            self.close()
            raise EpisodeFailed("the process that compares answers did not start", retryable=True)

    def ask(self, request: dict[str, str], timeout: float) -> dict[str, Any] | None:
        """Return the response to a request; None where the process gave none in time."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return None
        line = self._line(timeout)
        if line is None:
            return None
        verdict: dict[str, Any] = json.loads(line)
        return verdict

    def _line(self, timeout: float) -> bytes | None:
        assert self._process.stdout is not None
        descriptor, line, until = self._process.stdout.fileno(), b"", time.monotonic() + timeout
        while not line.endswith(b"\n"):
            if not select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            chunk = os.read(descriptor, 1 << 12)
            if not chunk:
                return None
            line += chunk
        return line

    def close(self) -> None:
        """End the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

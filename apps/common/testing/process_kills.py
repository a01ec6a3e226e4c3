"""Processes that are killed at a chosen moment, by a real SIGKILL: for the kill tests of the apps.

Runs are forked children: they share what was imported and nothing else. In a child, `watch_renames` or `kill_at_call`
says where it ends; what a run leaves on disk changes at renames, so those are the moments that matter. A process that
was started in another way gets a `KillPoint`, which can be pickled, and arms it itself.
"""

import functools
import gc
import importlib
import inspect
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Literal

When = Literal["before", "after"]
_FORK = multiprocessing.get_context("fork")


def start_child(target: Callable[..., Any], *args: Any, **kwargs: Any) -> ForkProcess:
    """Start `target(*args, **kwargs)` in a forked child.

    What this process has thrown away is collected here: in the child, a process group that an earlier run left behind
    would wait for threads that a fork does not copy.
    """
    gc.collect()
    child = _FORK.Process(target=target, args=args, kwargs=kwargs)
    child.start()
    return child


def in_child(target: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Run `target` in a forked child; its exit code, or minus the signal that ended it."""
    return end_of(start_child(target, *args, **kwargs))


def end_of(child: ForkProcess, seconds: float = 400) -> int:
    """Wait for the exit code of a child; one that hangs is killed.

    Raises:
        AssertionError: it stood after `seconds`.
    """
    child.join(seconds)
    if child.is_alive():
        child.kill()
        raise AssertionError(f"the run still stood after {seconds} s")
    assert child.exitcode is not None
    return child.exitcode


def watch_renames(folder: Path, kill_at: int | None = None, when: When = "before") -> list[str]:
    """Return from now on note every rename to a path in `folder`, in this process; end it at number `kill_at`, from 0.

    Returns:
        The targets, relative to `folder`: the list grows.
    """
    seen: list[str] = []
    numbers = itertools.count()  # renames of two threads have two numbers

    def watched(real: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            inside = str(target).startswith(str(folder))
            number = next(numbers) if inside else None
            if number is not None:
                seen.append(os.path.relpath(target, folder))
                if number == kill_at and when == "before":
                    kill_self()
            real(source, target, *args, **kwargs)
            if number is not None and number == kill_at:
                kill_self()

        return rename

    os.rename, os.replace = watched(os.rename), watched(os.replace)
    return seen


def kill_at_call(owner: Any, name: str, number: int = 1, when: When = "before", once: Path | None = None) -> None:
    """End this process at call `number`, from 1, of the function that `owner` has under `name`.

    "after" a coroutine function is when what it was asked for is done. `once`: a file that says that it has happened:
    the process that makes it ends, those that come after it go on.
    """
    real, calls = getattr(owner, name), itertools.count(1)  # calls of two threads have two numbers

    def end() -> None:
        if once is None or _made(once):
            kill_self()

    @functools.wraps(real)
    def counted(*args: Any, **kwargs: Any) -> Any:
        call = next(calls)
        if call == number and when == "before":
            end()
        result = real(*args, **kwargs)
        if call == number and when == "after":
            end()
        return result

    @functools.wraps(real)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        call = next(calls)
        if call == number and when == "before":
            end()
        result = await real(*args, **kwargs)
        if call == number and when == "after":
            end()
        return result

    setattr(owner, name, awaited if inspect.iscoroutinefunction(real) else counted)


def _made(path: Path) -> bool:
    """Make a file, on disk; whether it was not there, whoever else tries at the same moment."""
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.close(file)
    return True


@dataclass(frozen=True)
class KillPoint:
    """A moment in the life of a process: before or after its call number `number`, from 1, of `function`.

    `function` is written PACKAGE.MODULE:NAME or PACKAGE.MODULE:CLASS.NAME, where whoever calls it looks it up.
    """

    function: str
    when: When = "before"
    number: int = 1

    def arm(self, once: Path | None = None) -> None:
        """End this process there; see `kill_at_call`."""
        module, _, path = self.function.partition(":")
        *owners, name = path.split(".")
        kill_at_call(
            functools.reduce(getattr, owners, importlib.import_module(module)), name, self.number, self.when, once
        )


def stand_still(owner: Any, name: str) -> None:
    """From now on whoever calls the function that `owner` has under `name` waits for ever: a disk that hangs."""

    def wait(*args: Any, **kwargs: Any) -> None:
        del args, kwargs
        threading.Event().wait()

    setattr(owner, name, wait)


def kill_self() -> None:
    """End this process as the kernel would for want of memory: nothing is flushed, nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def silence(errors: Path | None = None) -> None:
    """Print to nowhere for the life of this process; errors to a file where one is given."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for the life of the process)
    if errors is not None:
        sys.stderr = errors.open("w")


def wait_for_row(path: Path, seconds: float = 200) -> None:
    """Wait until a file holds something."""
    deadline = time.monotonic() + seconds
    while not (path.is_file() and path.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert path.is_file()

"""Processes that are killed at a chosen moment, by a real SIGKILL: for the kill tests of the apps.

Runs are forked children: they share what was imported and nothing else. In a child, `watch_renames` or `kill_at_call`
sets the moment; what a run leaves on disk changes at renames, so those are the moments that matter. A process that was
started in another way gets a `KillPoint`, which can be pickled, and arms it itself.
"""

import contextlib
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

When = Literal["before", "after"]
_FORK = multiprocessing.get_context("fork")


def start_child(target: Callable[..., Any], *args: Any, **kwargs: Any) -> ForkProcess:
    """Start `target(*args, **kwargs)` in a forked child.

    Garbage is collected first: in the child, a process group of an earlier run would wait for threads that a fork does
    not copy.

    Raises:
        RuntimeError: such a group is still in use; the child would hang in it.
    """
    gc.collect()
    if dist.is_initialized():
        raise RuntimeError("a run of this process left its process group, which a fork breaks: test in another file")
    child = _FORK.Process(target=target, args=args, kwargs=kwargs)
    child.start()
    return child


def run_in_child(target: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Run `target` in a forked child; return its exit code, or minus the signal that ended it."""
    return wait_for_exit(start_child(target, *args, **kwargs))


def wait_for_exit(child: ForkProcess, seconds: float = 400) -> int:
    """Return the exit code of a child once it ends; kill one that hangs.

    Raises:
        AssertionError: it was alive after `seconds`.
    """
    child.join(seconds)
    if child.is_alive():
        child.kill()
        raise AssertionError(f"the run still stood after {seconds} s")
    assert child.exitcode is not None
    return child.exitcode


def import_modules(names: Iterable[str]) -> None:
    """Import the modules that a child had in the end, for all children after it to share."""
    for name in names:
        with contextlib.suppress(ImportError):  # what a module put there under a name of its own
            importlib.import_module(name)


def watch_renames(folder: Path, kill_at: int | None = None, when: When = "before") -> list[str]:
    """Record every rename to a path in `folder` by this process from now on; kill it at number `kill_at`, from 0.

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
    """Kill this process at call `number`, from 1, of the function `name` of `owner`.

    "after" a coroutine function is when it has returned. `once`: a file; the process that creates it ends, later ones
    go on.
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
    """Create a file on disk; return whether it is new, also where several processes try at once."""
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.close(file)
    return True


@dataclass(frozen=True)
class KillPoint:
    """A moment at which a process is killed: before or after its call number `number`, from 1, of `function`.

    `function` is written PACKAGE.MODULE:NAME or PACKAGE.MODULE:CLASS.NAME, where whoever calls it looks it up.
    """

    function: str
    when: When = "before"
    number: int = 1

    def arm(self, once: Path | None = None) -> None:
        """Kill this process there; see `kill_at_call`."""
        module, _, path = self.function.partition(":")
        *owners, name = path.split(".")
        kill_at_call(
            functools.reduce(getattr, owners, importlib.import_module(module)), name, self.number, self.when, once
        )


def hang_at_call(owner: Any, name: str) -> None:
    """Make every call of the function `name` of `owner` wait for ever, like a disk that hangs."""

    def wait(*args: Any, **kwargs: Any) -> None:
        del args, kwargs
        threading.Event().wait()

    setattr(owner, name, wait)


def kill_self() -> None:
    """Kill this process as the kernel does when memory runs out: nothing is flushed or cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def discard_output(errors: Path | None = None) -> None:
    """Discard the output of this process from now on; write errors to a file where one is named."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for the life of the process)
    if errors is not None:
        sys.stderr = errors.open("w")


def redirect_output(folder: Path) -> None:
    """Write what this process and those that it starts say to `stdout` and `stderr` in a folder from now on."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        with (folder / name).open("w") as file:
            os.dup2(file.fileno(), number)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115 (for the life of the process)


def wait_for_content(path: Path, seconds: float = 200) -> None:
    """Wait until a file has content."""
    deadline = time.monotonic() + seconds
    while not (path.is_file() and path.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert path.is_file()

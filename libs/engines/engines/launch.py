"""Start ranks: the only place that does. In this process for one, spawned over loopback for more, or joining
torchrun's."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engines.devices.detect import devices_of
from engines.heartbeats import begin_heartbeats, end_heartbeats, tell_late_ranks
from engines.torchrun import under_torchrun as under_torchrun

_STOP_SECONDS = 5.0
_GRACE_SECONDS = 0.2
_BEAT_SECONDS = 1.0
_FAULTS = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
"""Signals after which faulthandler has printed the stack of each thread."""


class RankError(RuntimeError):
    """A rank failed; the text holds its number and its traceback."""


class RankRefusedError(RankError, ValueError):
    """A rank refused what was asked with a ValueError; the text is its text, `traceback` says where."""

    def __init__(self, text: str, traceback: str) -> None:
        super().__init__(text)
        self.traceback = traceback


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    world_size: int = 1,
    device: str = "auto",
    threads: int | None = None,
    timeout_seconds: float | None = None,
    stall_seconds: float | None = None,
) -> Any:
    """Run fn(*args) on `world_size` ranks with an initialised process group, and return what rank 0 returned.

    One rank runs in this process. More are spawned on this machine and talk over loopback; `fn`, `args` and the result
    must then be picklable, and `fn` importable. Under torchrun this process joins as the rank it is, and `world_size`
    must be 1 or torchrun's, of all machines or of this one. The first rank that raises ends all others and becomes a
    RankError here, a ValueError a RankRefusedError, which is a ValueError too; no process outlives the call, nor this
    process. A rank may start processes of its own. `threads` sets torch's CPU threads of spawned ranks (1 by default).
    `timeout_seconds`: how long a collective of the default group waits, and of those that engines make; torch's own
    where it is not given. A spawned rank that says nothing for `stall_seconds` (stopped, or in code that holds the
    interpreter) ends the call with a RankError, its stack in its standard error; each beats every second. Under
    torchrun the ranks look after one another, and a silent one ends all of their processes (`engines.heartbeats`).
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if under_torchrun():
        ranks = int(os.environ["WORLD_SIZE"])
        here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        if world_size not in (1, here, ranks):
            told = f"{ranks} ranks" + (f", {here} of them here" if here != ranks else "")
            raise ValueError(f"torchrun started {told}, world_size={world_size} was asked for: drop one of the two")
    if runs_in_this_process(world_size):
        return _in_process(fn, args, device, timeout_seconds, stall_seconds)
    if dist.is_initialized():
        raise ValueError("this process is in a process group already: launch more ranks from outside of it")
    context = multiprocessing.get_context("spawn")
    return run_ranks(context, fn, args, world_size, device, threads or 1, timeout_seconds, None, stall_seconds)


def runs_in_this_process(world_size: int) -> bool:
    """Return whether `launch` runs its function in this process, so that its arguments need not be pickled."""
    return under_torchrun() or world_size == 1


def ensure_group(
    device: str = "auto", timeout_seconds: float | None = None, stall_seconds: float | None = None
) -> bool:
    """Initialise the process group where there is none: torchrun's, or a group of one. Return whether it did.

    `stall_seconds`: in a group of torchrun that this makes, all ranks end when one is silent for so long; see `launch`.
    """
    made = not dist.is_initialized()
    if made:
        _make_group(device, timeout_seconds)
        if under_torchrun():
            begin_heartbeats(stall_seconds)
    return made


def _make_group(device: str, timeout_seconds: float | None) -> None:
    if under_torchrun():
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        _set_device(device, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), here)
        dist.init_process_group(_backend(device), timeout=_time(timeout_seconds))
    else:
        _set_device(device, 0, 1)
        with _loopback(device):
            waits = _time(timeout_seconds)
            dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1, timeout=waits)


def _time(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)


def _in_process(
    fn: Callable[..., Any],
    args: Sequence[Any],
    device: str,
    timeout_seconds: float | None,
    stall_seconds: float | None,
) -> Any:
    made = ensure_group(device, timeout_seconds, stall_seconds)
    try:
        return fn(*args)
    except RuntimeError as error:
        tell_late_ranks(error)
        raise
    finally:
        if made:
            end_heartbeats()
            dist.destroy_process_group()


def run_ranks(
    context: Any,
    fn: Callable[..., Any],
    args: Sequence[Any],
    world_size: int,
    device: str,
    threads: int,
    timeout_seconds: float | None,
    within_seconds: float | None = None,
    stall_seconds: float | None = None,
) -> Any:
    """Run fn(*args) on ranks that a multiprocessing context starts, and return what rank 0 returned; see `launch`.
    TimeoutError where they have not answered `within_seconds`; they are ended."""
    try:
        work = pickle.dumps((fn, tuple(args)))  # by value: multiprocessing's own pickler would share tensors' memory
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"fn and args must be picklable to run on spawned ranks, fn a function of a module: {error}"
        ) from error
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        processes, pipes = [], []
        try:
            for rank in range(world_size):
                here, there = context.Pipe()
                store = str(Path(folder) / "store")
                job = (work, rank, world_size, device, threads, timeout_seconds, store, there)
                process = context.Process(target=_rank_main, args=job, daemon=True, name=f"rank{rank}")
                process.start()
                there.close()
                processes.append(process)
                pipes.append(here)
            return _await(processes, pipes, within_seconds, stall_seconds)
        finally:
            _stop(processes)
            for pipe in pipes:
                pipe.close()


def _await(
    processes: Sequence[Any], pipes: Sequence[Connection], seconds: float | None, stall_seconds: float | None
) -> Any:
    """Return rank 0's result once all have answered. RankError for the first that fails, dies silently or says nothing
    for `stall_seconds`, TimeoutError where some have not answered after `seconds`."""
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    end = float("inf") if seconds is None else time.monotonic() + seconds
    heard: dict[int, float] = {}
    clock, before, result = 0.0, time.monotonic(), None
    while open_pipes:
        answered = wait(list(open_pipes), min(_BEAT_SECONDS, max(0.0, end - time.monotonic())))
        clock += min(time.monotonic() - before, 2 * _BEAT_SECONDS)  # not while this process is stopped itself
        before = time.monotonic()
        if not answered and time.monotonic() >= end:
            raise TimeoutError(f"{len(open_pipes)} of {len(pipes)} ranks have not answered within {seconds:.0f} s")
        heard |= {open_pipes[ready]: clock for ready in answered}  # type: ignore[index]
        for rank in set(heard) & set(open_pipes.values()):
            if stall_seconds is not None and clock - heard[rank] > stall_seconds:
                raise _silence(rank, processes[rank].pid, stall_seconds)
        for ready in answered:
            rank = open_pipes[ready]  # type: ignore[index]
            try:
                kind, value = pickle.loads(ready.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                processes[rank].join(_STOP_SECONDS)
                raise RankError(f"rank {rank} {_end(processes[rank].exitcode)}") from None
            if kind == "beat":
                continue
            if kind == "error":
                raise _first_error(rank, value, open_pipes, processes)
            result = value if rank == 0 else result
            del open_pipes[ready]  # type: ignore[arg-type]
    for process in processes:
        process.join(_STOP_SECONDS)
    return result


def _silence(rank: int, pid: int, seconds: float) -> RankError:
    """Return what is told of a rank that is silent, once it has written its stacks, which one that is stopped can't."""
    os.kill(pid, signal.SIGUSR1)
    time.sleep(_BEAT_SECONDS)
    return RankError(
        f"rank {rank} said nothing for {seconds:g} s; the stacks of its threads are in its standard error, unless it "
        "is stopped"
    )


def _end(code: int | None) -> str:
    """Return how a process that sent nothing ended, from its exit code: negative where a signal ended it."""
    died, number = f"died with exit code {code}", -(code or 0)
    name = next((f" ({known.name})" for known in signal.Signals if known == number), "")
    if number in _FAULTS:
        return f"{died}{name} and said nothing; the stacks of its threads are in its standard error"
    return f"{died}{name} and said nothing{'; memory may have run out' if number == signal.SIGKILL else ''}"


def _first_error(
    rank: int, error: tuple[float, str, str | None], pipes: Mapping[Connection, int], processes: Sequence[Any]
) -> RankError:
    """Return the cause among errors that arrive together: a rank that died silently, else the earliest error."""
    errors = [(*error, rank)]
    for pipe, other in pipes.items():
        while other != rank and pipe.poll(_GRACE_SECONDS):
            try:
                kind, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[other].join(_STOP_SECONDS)
                return RankError(
                    f"rank {other} {_end(processes[other].exitcode)}; then rank {rank} failed:\n{error[1]}"
                )
            if kind == "error":
                errors.append((*value, other))
            if kind != "beat":
                break
    _, text, refusal, first = min(errors, key=lambda each: each[0])
    if refusal is not None:
        return RankRefusedError(f"{refusal} (told by rank {first})", text)
    return RankError(f"rank {first} failed:\n{text}")


def _stop(processes: Sequence[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    for process in processes:
        process.join(_STOP_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


def _rank_main(
    work: bytes,
    rank: int,
    world_size: int,
    device: str,
    threads: int,
    timeout_seconds: float | None,
    store: str,
    pipe: Connection,
) -> None:
    _end_with_parent(pipe)
    faulthandler.enable(2)  # a fault of native code says where it was, in every thread
    faulthandler.register(signal.SIGUSR1, 2)
    ended = threading.Lock()  # held while the pipe is written to, and for good before the last words
    threading.Thread(target=_beat, args=(pipe, ended), daemon=True).start()
    multiprocessing.current_process().daemon = False  # who starts it ends it; it may start processes of its own
    try:
        torch.set_num_threads(threads)
        _set_device(device, rank, world_size)
        files = dist.FileStore(store, world_size)
        with _loopback(device):
            waits = _time(timeout_seconds)
            dist.init_process_group(_backend(device), store=files, rank=rank, world_size=world_size, timeout=waits)
        fn, args = pickle.loads(work)
        answer = ("ok", fn(*args))
    except BaseException as error:  # noqa: BLE001 (handed to the parent, whatever it is: torch's checkpoint errors are no Exception)
        refusal = str(error) if isinstance(error, ValueError) else None
        ended.acquire()
        pipe.send_bytes(pickle.dumps(("error", (time.monotonic(), traceback.format_exc(), refusal))))
        os._exit(1)  # the other ranks may wait for this one in a collective: no orderly end
    dist.barrier()
    dist.destroy_process_group()
    ended.acquire()
    pipe.send_bytes(pickle.dumps(answer if rank == 0 else ("ok", None)))


def _beat(pipe: Connection, ended: threading.Lock) -> None:
    """Send a sign of life every second, until the end of this rank."""
    beat = pickle.dumps(("beat", None))
    while ended.acquire(blocking=False):
        try:
            pipe.send_bytes(beat)
        except OSError:
            return  # the launcher is gone
        finally:
            ended.release()
        time.sleep(_BEAT_SECONDS)


def _end_with_parent(pipe: Connection) -> None:
    """Start a thread that ends this process when the parent's end of the pipe closes, however the parent ended."""

    def watch() -> None:
        try:
            pipe.poll(None)
            pipe.recv()
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _backend(device: str) -> str:
    return devices_of(device).backend


def _set_device(device: str, rank: int, ranks_here: int) -> None:
    devices = devices_of(device)
    devices.use(rank)
    os.environ.update(devices.environment(os.environ, ranks_here))  # read when the first message is sent, so it stays


@contextmanager
def _loopback(device: str) -> Iterator[None]:
    """Bind collectives to the loopback interface while a group is made inside; restore the environment at the end."""
    names = devices_of(device).interfaces
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: os.environ.get(name, "lo") for name in names})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

"""A process group of a sender's and its samplers' own, over which each bucket of weights is broadcast once.

1. The sender holds a `RendezvousStore`: a store that listens on one address and nowhere else. Its `Rendezvous`
   reaches the samplers by the calls that they answer anyway, and with it all of them `join`: the sender as rank 0.
   Before anything else they prove to each other that they were told of it (`rollout.workers.authentication`).
2. `WeightGroup.send` and `take` are the two ends of a broadcast, of plain bytes: gloo's through host memory, NCCL's
   from device to device. What the bytes are, and their checksum, travels with the call
   (`rollout.workers.bucket_messages`).
3. Whatever lasts longer than `seconds` ends as a `BrokenGroup`, and so does the death of one of them: a group has no
   second try, its owner closes it and has its samplers replaced. `abort` ends what waits, from any thread.

torch's default process group is neither used nor changed: a trainer's ranks may have one of their own.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.private_api import gloo_options, set_timeout
from rollout.workers.authentication import AuthenticationError, Exchange, authenticate, exchange_in_store, mac

T = TypeVar("T")
Backend = Literal["gloo", "nccl"]
LOOPBACK = "127.0.0.1"
SECONDS = 60.0
"""Seconds until a broadcast of one bucket, or the making of a group, counts as hanging."""
_WATCHDOG_OFF = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Variables that turn torch's watchdog off: it ends the whole process, the trainer's, where one of NCCL's broadcasts
fails or hangs. Here `abort` ends the broadcast, and the pool is replaced."""
_changing = threading.Lock()


class BrokenGroup(RuntimeError):  # noqa: N818  what happened, in the words of a log
    """A broadcast or the making of a group failed or hung: nothing more can pass through this group."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the processes of a group meet, and how long each of them waits for the others at most."""

    backend: Backend
    host: str
    port: int
    size: int
    """Number of processes: the sender and its samplers."""
    token: str
    """Secret of this meeting: processes prove to each other that they were told it (`authenticate`)."""
    seconds: float = SECONDS

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}, got {self.backend!r}")
        if self.size < 2:
            raise ValueError(f"a group has a sender and at least one sampler, got {self.size} processes")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds must be above 0 and finite, got {self.seconds}")

    def message(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)

    @staticmethod
    def read(message: Mapping[str, Any]) -> "Rendezvous":
        """Read the result of `message`."""
        return Rendezvous(**message)


class RendezvousStore:
    """The sender's store on `host` alone, where `receivers` samplers find it.

    `host`: an address of this machine that they reach, loopback where all are on it. A stranger who reaches the store
    can spoil a meeting, not join it.
    """

    def __init__(self, backend: Backend, receivers: int, host: str = LOOPBACK, seconds: float = SECONDS) -> None:
        listen_addresses = socket.create_server((host, 0))  # torch's own store would listen on all interfaces
        port = listen_addresses.getsockname()[1]
        self.rendezvous = Rendezvous(backend, host, port, receivers + 1, secrets.token_hex(16), seconds)
        self._store = dist.TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listen_addresses.detach(),  # it is torch's now
        )

    def join(self, device: torch.device | None = None, secret: bytes = b"") -> "WeightGroup":
        """Wait for all samplers, as rank 0. `device`: NCCL's. Raise what `join` does."""
        return WeightGroup(self.rendezvous, 0, self._store, self.rendezvous.host, device, secret)


def connect(rendezvous: Rendezvous) -> "dist.Store":
    """Return a connection to the sender's store. Raise BrokenGroup where there is none."""
    try:
        return dist.TCPStore(
            rendezvous.host,
            rendezvous.port,
            is_master=False,
            timeout=timedelta(seconds=rendezvous.seconds),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise BrokenGroup(f"no sender of weights at {rendezvous.host}:{rendezvous.port}: {_first(error)}") from error


def join(
    rendezvous: Rendezvous,
    rank: int,
    host: str = LOOPBACK,
    device: torch.device | None = None,
    secret: bytes = b"",
) -> "WeightGroup":
    """Join all others as sampler number `rank` (from 1).

    `host`: an address of this process's machine that the others reach. `device`: of NCCL, each process's its own.
    `secret`: of the run (`rollout.workers.authentication.run_secret`), where the rendezvous itself is none.

    Raises:
        BrokenGroup: there is no sender, or not all came in time.
        AuthenticationError: one of them was not told of this rendezvous, or does not know the secret.
    """
    store = connect(rendezvous)
    return WeightGroup(rendezvous, rank, store, host, device, secret)


class WeightGroup:
    """A process's end of a group, from `RendezvousStore.join` or `join`. Its calls block: event loops use `waited`."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        store: "dist.Store",
        host: str,
        device: torch.device | None,
        secret: bytes = b"",
    ) -> None:
        if rendezvous.backend == "nccl" and (device is None or device.type != "cuda"):
            raise ValueError(f"NCCL passes weights between CUDA devices, and this process gave {device}")
        self.device = device if rendezvous.backend == "nccl" and device is not None else torch.device("cpu")
        self.rank, self.seconds = rank, rendezvous.seconds
        self._aborted = threading.Event()
        self._store = store  # of the sender it is the server
        self._known = mac(secret, rendezvous.token.encode())
        prefixed = dist.PrefixStore(mac(b"", rendezvous.token.encode()).hex(), store)  # the token itself is not sent
        limit = timedelta(seconds=rendezvous.seconds)
        try:
            self.key = authenticate(exchange_in_store(prefixed, rank, rendezvous.size, limit), rank, self._known)
            self._group = _group_of(rendezvous, rank, prefixed, host)
            mark = mac(self.key, b"met").hex()  # the key itself is not sent
            met = self._exchange_token(mark, rank)
        except RuntimeError as error:
            if isinstance(error, BrokenGroup | AuthenticationError):
                raise
            raise BrokenGroup(f"{rendezvous.size} processes did not all meet: {_first(error)}") from error
        if met != mark:
            raise BrokenGroup("the group is not the one that was meant: its sender has another key")

    @property
    def process_group(self) -> Any:
        """The group of torch, for sends between two of its processes (`rollout.workers.shard_exchange`)."""
        return self._group

    def new_key(self, exchange: Exchange) -> bytes:
        """Return the key of this time, once all have authenticated again; `exchange`: through the group.

        Raises:
            AuthenticationError: a process does not know what it was told.
        """
        return authenticate(exchange, self.rank, self._known)

    def send(self, data: Tensor) -> None:
        """Broadcast bytes, uint8, contiguous, on `device`. Raise BrokenGroup where that takes too long."""
        self._broadcast(data)

    def take(self, nbytes: int) -> Tensor:
        """Receive the sender's bytes, uint8, on `device`. Raise BrokenGroup where that takes too long."""
        data = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._broadcast(data)
        return data

    def abort(self) -> None:
        """End all waiting calls, from any thread; further ones fail. A second call does nothing."""
        if not self._aborted.is_set():
            self._aborted.set()
            waited(self._group.abort, "weights: abort")

    def _exchange_token(self, token: str, rank: int) -> str:
        """Broadcast the token from the sender; NCCL makes its connections with this first broadcast."""
        mine = torch.frombuffer(bytearray(token.encode()), dtype=torch.uint8).to(self.device)
        data = mine if rank == 0 else torch.zeros_like(mine)
        # A hanging one can't be aborted before NCCL has made its connections: callers go on without it.
        limit = None if self.device.type == "cpu" else self.seconds
        with _nccl_of(self.device, self._store):
            try:
                waited(lambda: self._broadcast(data), "weights: meet").result(limit)
            except TimeoutError as error:
                raise BrokenGroup(f"NCCL did not connect the group of weights in {limit:g} s") from error
        return bytes(data.cpu().tolist()).decode(errors="replace")

    def _broadcast(self, data: Tensor) -> None:
        if not data.numel():
            return
        if self._aborted.is_set():
            raise BrokenGroup("the group of weights was ended")
        try:
            if self.device.type == "cpu":
                self._group.broadcast([data], _from_sender()).wait(timedelta(seconds=self.seconds))
            else:
                self._broadcast_on_device(data)
        except BrokenGroup:
            raise
        except RuntimeError as error:
            raise BrokenGroup(f"a broadcast of weights failed: {_first(error)}") from error

    def _broadcast_on_device(self, data: Tensor) -> None:
        """Broadcast, and wait on the host until the device is done; NCCL's own wait blocks a stream alone.

        It is in a stream of its own: where it hangs, no other work of the process waits for it.
        """
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.default_stream())  # whose memory `data` was
            with torch.cuda.stream(stream):
                work = self._group.broadcast([data], _from_sender())
                if work is not None:  # None: it is in this stream already
                    work.wait()
                done = torch.cuda.Event()
                done.record(stream)
            self._passed(done)

    def _passed(self, done: "torch.cuda.Event") -> None:
        limit = time.monotonic() + self.seconds
        while not done.query():
            if time.monotonic() > limit:
                self.abort()
                raise BrokenGroup(f"a broadcast of weights did not end in {self.seconds:g} s")
            if self._aborted.is_set():
                break
            time.sleep(2e-4)
        if self._aborted.is_set():  # which ends what the device does, too
            raise BrokenGroup("a broadcast of weights was ended")


def _from_sender() -> "dist.BroadcastOptions":
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options


def waited(work: Callable[[], T], name: str) -> "Future[T]":
    """Run blocking work in a daemon thread, for which no process waits at its end."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # it is never cancelled: a caller may just stop waiting

    def run() -> None:
        try:
            future.set_result(work())
        except (RuntimeError, ValueError, OSError) as error:
            future.set_exception(error)
        finally:
            if not future.done():
                future.set_exception(RuntimeError(f"{name}: ended without an answer"))

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _group_of(rendezvous: Rendezvous, rank: int, store: "dist.Store", host: str) -> Any:
    """Make torch's process group, unknown to `torch.distributed`. gloo's is connected, NCCL's connects later."""
    limit = timedelta(seconds=rendezvous.seconds)
    if rendezvous.backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, rendezvous.size, gloo_options(limit, host))
    if not dist.is_nccl_available():
        raise ValueError("this torch has no NCCL: use gloo or objects")
    nccl: Any = dist.ProcessGroupNCCL.Options()
    nccl.global_ranks_in_group, nccl.group_name = list(range(rendezvous.size)), f"weights {rendezvous.token}"
    set_timeout(nccl, timedelta(days=1))  # the limit is checked here: torch's own check ends the process
    with _variables(_WATCHDOG_OFF):
        return dist.ProcessGroupNCCL(store, rank, rendezvous.size, nccl)


def _nccl_of(device: torch.device, store: "dist.Store") -> Any:
    """Return where NCCL's own sockets are when it makes its connections: with a store on loopback they are there too.

    NCCL reads this once in a process's life. An interface that the environment names is kept.
    """
    on_loopback = isinstance(store, dist.TCPStore) and store.host == LOOPBACK
    if device.type == "cpu" or not on_loopback or "NCCL_SOCKET_IFNAME" in os.environ:
        return nullcontext()
    return _variables({"NCCL_SOCKET_IFNAME": "lo"})


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables meanwhile, for libraries that have no other settings."""
    with _changing:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

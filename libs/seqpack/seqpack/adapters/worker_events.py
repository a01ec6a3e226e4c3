"""What a dataset in a DataLoader's workers tells the process that made it, and what its source sees of them."""

import os
import zlib
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

_SLOTS = 64


class StreamCounts(NamedTuple):
    """Numbers of samples of an iteration so far, over all ranks and workers."""

    overlong: int = 0
    """Left out, because they do not fit a row."""
    empty: int = 0
    """Left out, because they have no token."""
    truncated: int = 0
    """Given, but cut to fit a row."""
    last_step: int = 0
    """Left out at the end, because their rows are too few for one on each rank."""


class WorkerEvents:
    """What the workers of a DataLoader let each other and the process that made the stream know, in shared memory."""

    def __init__(self) -> None:
        self._iteration = torch.tensor(-1).share_memory_()
        self._counts = torch.zeros(len(StreamCounts()), dtype=torch.int64).share_memory_()
        self._read = torch.zeros(_SLOTS, dtype=torch.int64).share_memory_()
        self._loads = torch.tensor(0).share_memory_()
        self._seen = self._turn = 0
        self._mine = os.getpid()

    @property
    def by_workers(self) -> bool:
        """Whether workers iterated, and nobody else or no state was loaded since."""
        return int(self._iteration) >= 0

    @property
    def counts(self) -> StreamCounts:
        """What the running or last iteration left out so far."""
        return StreamCounts(*self._counts.tolist())

    @counts.setter
    def counts(self, counts: StreamCounts) -> None:
        self._counts[:] = torch.tensor(counts)

    def check_read(self, place: str, digest: int) -> None:
        """Raise ValueError where another worker of this iteration read other samples up to this place."""
        if not self.by_workers:
            return
        key = zlib.crc32(f"{int(self._iteration)} {self._turn} {place}".encode()) >> 1
        mine = key << 32 | digest  # one number, so that no reader sees half of it
        other = int(self._read[key % _SLOTS])
        if other >> 32 == key and other != mine:
            raise ValueError(
                f"the workers of the DataLoader read different samples from the source ({place}): its order is drawn "
                "anew in each process, or it divides itself. Fix its seed (shuffle(seed=...)), or use num_workers=0"
            )
        self._read[key % _SLOTS] = mine

    def forget(self) -> None:
        """Forget the workers' events: a state was loaded in this process, for the next iteration."""
        if get_worker_info() is None:
            self._iteration.fill_(-1)
            self._loads += 1
            self._seen = int(self._loads)
        self._mine = os.getpid()

    def state_for(self, worker: Any, loaded: dict[str, Any] | None) -> dict[str, Any]:
        """Return the loaded state, or nothing where it was for an earlier iteration's workers.

        ValueError in workers that persist and never saw the state that was loaded since.
        """
        if worker is not None and int(self._loads) != self._seen:
            raise ValueError("a state was loaded after these persistent workers began: load it before them")
        self._turn += 1
        last = int(self._iteration)
        iteration = worker.seed - worker.id if worker else -1  # a DataLoader draws a new seed each time
        self._iteration.fill_(iteration)
        own = worker is not None and os.getpid() == self._mine  # loaded by this worker, not by the process before it
        used = last not in (-1, iteration) and not own
        return {} if loaded is None or used else loaded

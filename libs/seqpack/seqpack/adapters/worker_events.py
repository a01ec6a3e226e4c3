"""What a dataset in a DataLoader's worker processes tells the process that made it."""

import os
from typing import Any

import torch
from torch.utils.data import get_worker_info


class WorkerEvents:
    """What the workers of a DataLoader let the process know that made the stream: two numbers in shared memory."""

    def __init__(self) -> None:
        self._numbers = torch.tensor([-1, 0]).share_memory_()
        self._mine = os.getpid()

    @property
    def by_workers(self) -> bool:
        """Whether workers iterated, and nobody else or no state was loaded since."""
        return int(self._numbers[0]) >= 0

    @property
    def dropped(self) -> int:
        """Number of samples that the last whole iteration left out."""
        return int(self._numbers[1])

    @dropped.setter
    def dropped(self, samples: int) -> None:
        self._numbers[1] = samples

    def forget(self) -> None:
        """Forget the workers' events: a state was loaded in this process, for the next iteration."""
        if get_worker_info() is None:
            self._numbers[0] = -1
        self._mine = os.getpid()

    def state_for(self, worker: Any, loaded: dict[str, Any] | None) -> dict[str, Any]:
        """Return the loaded state, or nothing where it was for an earlier iteration's workers."""
        last = int(self._numbers[0])
        iteration = worker.seed - worker.id if worker else -1  # a DataLoader draws a new seed each time
        self._numbers[0] = iteration
        own = worker is not None and os.getpid() == self._mine  # loaded by this worker, not by the process before it
        used = last not in (-1, iteration) and not own
        return {} if loaded is None or used else loaded

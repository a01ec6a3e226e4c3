"""Checkpoints that are written while training continues: it waits for a copy to host memory alone.

1. An earlier save is waited for: one checkpoint is written at a time.
2. The state is copied to host memory, with the random state and the facts of this moment.
3. A thread writes, hashes and moves it to its directory (`engines.storage.checkpoint`), on a gloo group of its own,
   since the collectives of two threads on one group would mix.

An error of the thread is raised by the next call of `save` or `wait`, on every rank.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dyncp.comm.process_groups import world_timeout
from engines.storage.checkpoint import random_state, save_checkpoint
from seqpack.memory import ledger


class CheckpointWriter:
    """A writer of one checkpoint at a time, in the background where asked to. `save` and `wait` are collective."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._error: OSError | RuntimeError | None = None
        self._copied: dict[str, Any] = {}
        ledger.register(ledger.CHECKPOINT, self, lambda it: it._copied)

    def save(
        self,
        directory: Path,
        state: dict[str, Any],
        metadata: Mapping[str, Any],
        wait: bool = True,
        also: Sequence[Path] = (),
    ) -> None:
        """Write a checkpoint; without `wait` return as soon as the state has been copied to host memory."""
        self.wait()
        if wait:
            save_checkpoint(directory, state, metadata, also=also)
            return
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=world_timeout())
        self._copied = on_host(state)
        ledger.observe(self, ledger.CHECKPOINT, again=True)
        args = (directory, self._copied, dict(metadata), random_state(), self._group, tuple(also))
        # No daemon: a process that ends in order finishes what it began to write.
        self._thread = threading.Thread(target=self._write, args=args, name="checkpoint")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the last checkpoint is whole. Not collective: other ranks may learn of it a moment later."""
        return (self._thread is None or not self._thread.is_alive()) and self._error is None

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, and raise its error."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, *args: Any) -> None:
        try:
            save_checkpoint(*args)
        except (OSError, RuntimeError) as error:
            self._error = error
        finally:
            self._copied = {}


def on_host(state: Any) -> Any:
    """Copy a nested state to host memory; its tensors share nothing with those given, shards stay shards."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: on_host(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(on_host(value) for value in state)
    return state

"""Checkpoints that are written while a run trains: what depends on one being whole is done once it is.

1. `begin` waits for the write before it where that still goes on, has the state copied to host memory, and returns.
2. `look`, between steps, does what had to wait: the run's record of the checkpoint, and the deletion of old ones.
3. The end of the block waits for the last write, whether the run is done, stopped or broken.

A step is stalled by the copy alone, unless the disk takes longer than the steps between two checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from apps.common.run.checkpoints import delete_old_checkpoints
from apps.common.run.interrupts import held
from apps.common.run.ranks import rank_and_world
from engines import TrainEngine


def _nothing(step: int) -> None:
    """Keep no record."""


class Saves:
    """A context manager; every rank has one. `keep`: old checkpoints of `run_dir` that stay, see `begin`.

    `saving(step)` is called before the state of `step` is copied, when every earlier write is over; `saved(step)` once
    its checkpoint is whole, which is some steps later. What `saving` records is not the run's until then.
    """

    def __init__(
        self,
        engine: TrainEngine,
        run_dir: Path,
        keep: int,
        saving: Callable[[int], None] = _nothing,
        saved: Callable[[int], None] = _nothing,
    ) -> None:
        self._engine, self._run_dir, self._keep = engine, run_dir, keep
        self._saving, self._saved = saving, saved
        self._begun: int | None = None

    def __enter__(self) -> "Saves":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the last write; of a run that ends with an error only that, its record comes with the next start."""
        if error is None:
            self.settle()
            return
        try:
            with held():
                self._engine.wait_for_saves()
        except (OSError, RuntimeError) as failed:
            error.add_note(f"and the last checkpoint was not written: {failed}")

    def begin(self, step: int, directories: Sequence[Path], extra: Mapping[str, Any] | None = None) -> None:
        """Begin to write the state after `step` steps to these directories, which appear one after another.

        `extra`: what else they say, which loading returns; plain JSON.

        Raises:
            OSError, RuntimeError: what was begun before could not be written.
        """
        first, *also = directories
        with held():
            self.settle()
            self._saving(step)
            self._engine.save(first, extra, wait=False, also=also)
            self._begun = step

    def look(self) -> None:
        """Do what had to wait for a write, if it is over. Not collective: ranks may see it at different steps."""
        if self._begun is not None and self._engine.saves_done():
            self.settle()

    def settle(self) -> None:
        """Wait for the write that goes on, and do what had to wait for it.

        Raises:
            OSError, RuntimeError: it could not be written.
        """
        with held():
            step, self._begun = self._begun, None
            self._engine.wait_for_saves()
            if step is None:
                return
            self._saved(step)
            if rank_and_world()[0] == 0:
                delete_old_checkpoints(self._run_dir, self._keep)

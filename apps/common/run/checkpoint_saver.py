"""Checkpoints that are written while training goes on.

1. `begin` waits for the write before it, has the state copied to host memory, and returns.
2. `look`, between steps, records a checkpoint that is whole, and deletes old ones.
3. The end of the block waits for the last write, whether the run is done, stopped or broken.

The copy alone stalls a step, unless the disk takes longer than the steps between two checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from apps.common.run.checkpoints import delete_old_checkpoints
from apps.common.run.full_disk import writing
from engines import TrainEngine
from engines.storage.disks import find_disks
from schedules.runtime.interrupts import defer_interrupts


def _nothing(step: int) -> None:
    """Do nothing."""


class CheckpointSaver:
    """A context manager on every rank that writes checkpoints; it keeps the newest `keep` old ones of `run_dir`.

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
        self._deletes = find_disks(run_dir).leads

    def __enter__(self) -> "CheckpointSaver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the last write; after an error do nothing else, the next start records that checkpoint."""
        if error is None:
            self.settle()
            return
        try:
            with defer_interrupts():
                self._engine.wait_for_saves()
        except (OSError, RuntimeError) as failed:
            error.add_note(f"and the last checkpoint was not written: {failed}")

    def begin(self, step: int, directories: Sequence[Path], extra: Mapping[str, Any] | None = None) -> None:
        """Begin to write the state after `step` steps to these directories, one after another.

        `extra`: what else they say, which loading returns; plain JSON.

        Raises:
            OSError, RuntimeError: what was begun before could not be written; FullDiskError where the disk is full.
        """
        first, *also = directories
        with defer_interrupts():
            self.settle()
            with self._writing(step):
                self._saving(step)
                self._engine.save(first, extra, wait=False, also=also)
            self._begun = step

    def _writing(self, step: int | None) -> AbstractContextManager[None]:
        return writing("a checkpoint" if step is None else f"the checkpoint of step {step}", self._run_dir)

    def look(self) -> None:
        """Record a checkpoint whose write is over, and delete old ones. Ranks may see it at different steps."""
        if self._begun is not None and self._engine.saves_done():
            self.settle()

    def settle(self) -> None:
        """Wait for the write in progress, record it and delete old checkpoints.

        Raises:
            OSError, RuntimeError: it could not be written; FullDiskError where the disk is full.
        """
        with defer_interrupts():
            step, self._begun = self._begun, None
            with self._writing(step):
                self._engine.wait_for_saves()
                if step is None:
                    return
                self._saved(step)
            if self._deletes:
                delete_old_checkpoints(self._run_dir, self._keep)

"""`RolloutLedger`: an append-only file with the state of every group of an asynchronous run.

1. Written ahead: a group is recorded before it is sampled, its payload before `finished` returns, a step before it is
   trained. So at any kill the file holds at least what was done.
2. A checkpoint holds the weights of a step. A run that resumes from it trains the recorded steps after it again, on the
   same groups with the same payloads, and then goes on: no group is skipped, and in the history of the remaining
   weights none is trained twice. Groups that were being sampled begin again. One that ended without signal
   (`no_signal`) stays done.
3. Every record is handed to the operating system at once: a killed process loses nothing. `fsync="steps"` also waits
   for the disk at steps, checkpoints and compactions: a machine that loses its power loses at most what was sampled
   since, and samples it again. "always" waits at every record, "never" at none.
4. Compaction, after a checkpoint, writes what is still needed into a new file and renames it over the old one. It is
   skipped while the disk is too full for both.
"""

import errno
import fcntl
import gc
import mmap
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args

from rollout.ledger.reading import records
from rollout.ledger.records import (
    HEAD_BYTES,
    MAGIC,
    NUMBER_BYTES,
    NUMBER_LIMIT,
    Kind,
    frame,
    number_body,
    numbers_body,
    read_number,
    read_numbers,
    read_started,
    started_body,
)
from rollout.ledger.state import LedgerState, Sampled
from seqpack.renamed import renamed

Fsync = Literal["always", "steps", "never"]
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SLACK = 1 << 20  # dead bytes from which a file is compacted
_COPY_BYTES = 1 << 20
_MEND = "put back the file that this run wrote, or begin a new run from its export (--model)"


class RolloutLedger:
    """The ledger of one run; a context manager. One process at a time may hold it.

    `step`: that of the checkpoint that the run resumes from, 0 where there is none; None: of the last checkpoint in the
    ledger. Groups that were being sampled when the run ended are in `state.missing()`, steps that were recorded after
    the checkpoint in `state.batches`.

    `run`: the number of the run, below 2**48, which a new ledger records; None: of none.

    After an error of a disk that is full, open it anew.

    Raises:
        ValueError: another process holds it, it is no ledger or damaged, another run wrote it, the checkpoint is older
            than one that the ledger knows to be whole, or of a step that it does not know. The text says what mends it.
    """

    def __init__(
        self, path: Path | str, step: int | None = None, fsync: Fsync = "steps", run: int | None = None
    ) -> None:
        if run is not None and not 0 <= run < NUMBER_LIMIT:
            raise ValueError(f"run is a number in [0, {NUMBER_LIMIT}), got {run}")
        if fsync not in get_args(Fsync):
            raise ValueError(f"fsync is one of {', '.join(get_args(Fsync))}, got {fsync!r}")
        self.path = Path(path)
        self.state = LedgerState()
        self._fsync = fsync
        self._end = 0
        self._said_full = False
        self._file = self._locked()
        opened = False
        try:
            self._end = self._read()
            self._check_run(run)
            self._go_on_from(self.state.saved if step is None else step)
            opened = True
        finally:
            if not opened:
                os.close(self._file)

    def __enter__(self) -> "RolloutLedger":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def started(self, group: int, version: int) -> None:
        """Record that a group is about to be sampled with the weights of `version`."""
        self.state.begin(group, version)
        self._append(Kind.STARTED, started_body(group, version))

    begun = renamed("started")

    def finished(self, group: int, payload: bytes = b"") -> None:
        """Record that a group is sampled; `payload(group)` returns its payload until a checkpoint holds it."""
        offset = self._end + HEAD_BYTES + NUMBER_BYTES
        self.state.finish(group, offset, len(payload))
        self._append(Kind.FINISHED, number_body(group, payload))

    def no_signal(self, group: int) -> None:
        """Record that a group is sampled, and that no step will train it: it is done, and never begins again."""
        self.state.drop(group)
        self._append(Kind.NO_SIGNAL, number_body(group))

    def again(self, group: int) -> None:
        """Record that a group failed with its sampler, and may begin again."""
        self.state.again(group)
        self._append(Kind.AGAIN, number_body(group))

    def train(self, step: int, groups: Sequence[int]) -> None:
        """Record that a step is about to be trained on these groups; do nothing for a step that is repeated."""
        if step in self.state.batches:
            self.state.train(step, groups)
            return
        self.state.train(step, groups)
        self._append(Kind.TRAIN, numbers_body(step, groups), barrier=True)

    def saved(self, step: int) -> None:
        """Record that a checkpoint of this step is whole on disk: its steps are never repeated. May compact."""
        self.state.save(step)
        self._append(Kind.SAVED, number_body(step), barrier=True)
        if self._end > 2 * self._live() + _SLACK:
            self.compact()

    def payload(self, group: int) -> bytes:
        """Return the payload of a sampled group. Raise KeyError where it is not sampled, or a checkpoint holds it."""
        entry = self.state.sampled[group]
        return os.pread(self._file, entry.length, entry.offset)

    def compact(self) -> bool:
        """Rewrite the file with what is still needed: whole or not at all, whenever the process ends.

        Returns False where the disk is too full for it, with one warning; the file is as it was, and a later checkpoint
        tries again.
        """
        part = self.path.with_suffix(".part")
        new = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        whole = False
        try:
            moved, end = self._write_live(new)
            if self._fsync != "never":
                os.fsync(new)
            fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(part, self.path)
            whole = True
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._say_full(error)
            return False
        finally:
            if not whole:
                os.close(new)
                part.unlink(missing_ok=True)
        if self._fsync != "never":
            _fsync_folder(self.path.parent)
        os.close(self._file)
        self._file, self._end = new, end
        self.state.sampled.update(moved)
        return True

    def close(self) -> None:
        """Close the file. Nothing is buffered in memory."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _locked(self) -> int:
        """Return the file, made where it was not there, locked by this process alone."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise ValueError(f"{self.path} is in use by another process: end that run first") from None
        return file

    def _read(self) -> int:
        """Apply all records to the state, drop a torn tail; return where the next record goes."""
        size = os.fstat(self._file).st_size
        if size < len(MAGIC):
            os.ftruncate(self._file, 0)
            self._write(MAGIC)
            return len(MAGIC)
        with mmap.mmap(self._file, size, prot=mmap.PROT_READ) as data, memoryview(data) as view:
            if view[: len(MAGIC)] != MAGIC:
                raise ValueError(f"{self.path} is not a ledger of this version: {_MEND}")
            try:
                with _without_gc():
                    end = self._fold(view)
            except ValueError as error:
                raise ValueError(f"{self.path}: {error}; {_MEND}") from error
        os.ftruncate(self._file, end)
        return end

    def _fold(self, data: memoryview) -> int:
        """Apply every whole record to the state; return where the last one ends."""
        state, end = self.state, len(MAGIC)
        started, finished = int(Kind.STARTED), int(Kind.FINISHED)  # an enum's member costs as much as a record
        for kind, begin, end in records(data, len(MAGIC)):
            if kind == started:
                state.begin(*read_started(data, begin))
            elif kind == finished:
                state.finish(read_number(data, begin), begin + NUMBER_BYTES, end - begin - NUMBER_BYTES)
            elif kind == Kind.TRAIN:
                state.train(*read_numbers(data, begin, end))
            elif kind == Kind.SAVED:
                state.save(read_number(data, begin))
            elif kind == Kind.AGAIN:
                state.again(read_number(data, begin))
            elif kind == Kind.NO_SIGNAL:
                state.drop(read_number(data, begin))
            elif kind == Kind.RUN:
                state.run = read_number(data, begin)
            else:
                state.saved, pairs = read_numbers(data, begin, end)
                state.done.begins, state.done.ends = list(pairs[::2]), list(pairs[1::2])
        return end

    def _check_run(self, run: int | None) -> None:
        """Record the run's number in a ledger that is new. Raise ValueError where another run wrote it."""
        if run is not None and self._end == len(MAGIC):
            self.state.run = run
            self._append(Kind.RUN, number_body(run))
        if None not in (run, self.state.run) and run != self.state.run:
            raise ValueError(f"{self.path} was written by another run, though its steps may be as many: {_MEND}")

    def _go_on_from(self, step: int) -> None:
        state = self.state
        if step < state.saved:
            raise ValueError(
                f"{self.path} knows of a checkpoint of step {state.saved}, and the run would go on from step {step}: "
                "bring that checkpoint back, or begin a new run"
            )
        if step > state.saved + len(state.batches):
            raise ValueError(
                f"{self.path} knows of no step {step}, whose checkpoint the run would go on from: it is another run's, "
                f"an older copy, or was emptied; {_MEND}"
            )
        if step > state.saved:
            self.saved(step)  # the kill came between the checkpoint and its record
        for group in list(state.running):
            self.again(group)

    def _append(self, kind: Kind, body: bytes, barrier: bool = False) -> None:
        self._write(frame(kind, body))
        if self._fsync == "always" or (barrier and self._fsync == "steps"):
            os.fsync(self._file)

    def _write(self, data: bytes) -> None:
        """Append all bytes, or cut the file back to what it was. Raise ValueError where the disk is full."""
        at = self._end
        try:
            done = os.pwrite(self._file, data, at)
            while done < len(data):
                done += os.pwrite(self._file, data[done:], at + done)
        except OSError as error:
            os.ftruncate(self._file, at)
            if error.errno in _FULL:
                raise ValueError(
                    f"{self.path} cannot grow ({error.strerror}): free some space and go on with --resume"
                ) from error
            raise
        self._end = at + len(data)

    def _say_full(self, error: OSError) -> None:
        if not self._said_full:
            self._said_full = True
            warnings.warn(
                f"{self.path} is not compacted ({error.strerror}) and grows on: free some space",
                RuntimeWarning,
                stacklevel=3,
            )

    def _live(self) -> int:
        """Estimate the bytes of a compacted file."""
        sampled = sum(entry.length for entry in self.state.sampled.values())
        return sampled + 64 * (len(self.state.sampled) + len(self.state.running)) + 16 * len(self.state.done.begins)

    def _write_live(self, file: int) -> tuple[dict[int, Sampled], int]:
        """Write the state into a file; return where its payloads lie there, and its length."""
        state, end, moved = self.state, 0, {}
        buffer = bytearray(MAGIC)

        def flush() -> None:
            nonlocal end
            view = memoryview(buffer)
            while view:
                written = os.write(file, view)
                end, view = end + written, view[written:]
            del view
            buffer.clear()

        if state.run is not None:
            buffer += frame(Kind.RUN, number_body(state.run))
        buffer += frame(Kind.BASE, numbers_body(state.saved, state.done.pairs()))
        for group, entry in state.sampled.items():
            buffer += frame(Kind.STARTED, started_body(group, entry.version))
            moved[group] = Sampled(entry.version, end + len(buffer) + HEAD_BYTES + NUMBER_BYTES, entry.length)
            buffer += frame(Kind.FINISHED, number_body(group, self.payload(group)))
            if len(buffer) > _COPY_BYTES:
                flush()
        for step, groups in sorted(state.batches.items()):
            buffer += frame(Kind.TRAIN, numbers_body(step, groups))
        for group, version in state.running.items():
            buffer += frame(Kind.STARTED, started_body(group, version))
        flush()
        return moved, end


@contextmanager
def _without_gc() -> Iterator[None]:
    """Disable the garbage collector meanwhile: it would walk a million new entries again and again, and all stay."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _fsync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)

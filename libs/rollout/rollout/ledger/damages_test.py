"""What is said of each damage to a ledger, and whether the run goes on: a table."""

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout.ledger.ledger import RolloutLedger
from rollout.ledger.records import MAGIC

PUT_BACK = "put back the file that this run wrote, or begin a new run from its export (--model)"
Damage = Callable[[Path], None]


RUN, TWIN = 7, 2**47 + 11


def written(path: Path, steps: int, saved: int, run: int = RUN) -> None:
    """A run of two groups a step, one group sampled ahead, one that was being sampled."""
    with RolloutLedger(path, run=run) as ledger:
        for step in range(1, steps + 1):
            for group in (2 * step, 2 * step + 1):
                ledger.started(group, step)
                ledger.finished(group, b"episodes of %d" % group)
            ledger.train(step, [2 * step, 2 * step + 1])
            if step == saved:
                ledger.saved(step)
        ledger.started(100, steps)
        ledger.finished(100, b"ahead")
        ledger.started(101, steps)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def torn(path: Path) -> None:
    """The last record, of the group that was being sampled, ends half-way."""
    os.truncate(path, path.stat().st_size - 3)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(MAGIC) + 40] ^= 1
    path.write_bytes(data)


def holed(path: Path) -> None:
    """A block that the disk lost."""
    data = bytearray(path.read_bytes())
    data[len(MAGIC) : len(MAGIC) + 60] = bytes(60)
    path.write_bytes(data)


def twice(path: Path) -> None:
    """Two copies, one behind the other."""
    path.write_bytes(path.read_bytes() + path.read_bytes()[len(MAGIC) :])


def other_file(path: Path) -> None:
    path.write_text("step,loss\n1,0.5\n" * 100)


def other_version(path: Path) -> None:
    path.write_bytes(bytes([MAGIC[0] ^ 1]) + path.read_bytes()[1:])


def older_copy(path: Path) -> None:
    path.unlink()
    written(path, steps=2, saved=1)


def longer_run(path: Path) -> None:
    path.unlink()
    written(path, steps=9, saved=8)


def twin(path: Path) -> None:
    """The ledger of another run with the same steps."""
    path.unlink()
    written(path, steps=5, saved=4, run=TWIN)


def compacted_twin(path: Path) -> None:
    twin(path)
    with RolloutLedger(path, 4, run=TWIN) as ledger:
        assert ledger.compact()


def trailing(path: Path) -> None:
    """Zeros that a file system adds after a crash."""
    with path.open("ab") as file:
        file.write(bytes(4096))


TABLE: dict[str, tuple[Damage, str | None]] = {
    "torn": (torn, None),
    "trailing zeros": (trailing, None),
    "emptied": (emptied, f"knows of no step 4, .* or was emptied; {re.escape(PUT_BACK)}"),
    "older copy": (older_copy, f"knows of no step 4, .* an older copy, .*; {re.escape(PUT_BACK)}"),
    "longer run": (longer_run, "knows of a checkpoint of step 8, and the run would go on from step 4: bring that"),
    "twin": (twin, f"was written by another run, though its steps may be as many: {re.escape(PUT_BACK)}"),
    "compacted twin": (compacted_twin, f"was written by another run, .*: {re.escape(PUT_BACK)}"),
    "flipped bit": (flipped, rf"the record at byte \d+ is damaged, and others follow it; {re.escape(PUT_BACK)}"),
    "hole": (holed, rf"the record at byte \d+ is damaged, and others follow it; {re.escape(PUT_BACK)}"),
    "twice": (twice, f"was begun already: .*; {re.escape(PUT_BACK)}"),
    "another file": (other_file, f"is not a ledger of this version: {re.escape(PUT_BACK)}"),
    "another version": (other_version, f"is not a ledger of this version: {re.escape(PUT_BACK)}"),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_damage_is_told_and_its_remedy_works(tmp_path: Path, name: str) -> None:
    """The run has a checkpoint of step 4. A refusal changes nothing, and the file put back goes on."""
    damage, told = TABLE[name]
    path, kept = tmp_path / "ledger.bin", tmp_path / "kept"
    written(path, steps=5, saved=4)
    shutil.copy(path, kept)
    damage(path)
    if told is not None:
        before = path.read_bytes()
        with pytest.raises(ValueError, match=told) as refused:
            RolloutLedger(path, 4, run=RUN)
        assert str(path) in str(refused.value)
        assert path.read_bytes() == before or name == "emptied"
        shutil.copy(kept, path)
    with RolloutLedger(path, 4, run=RUN) as ledger:
        state = ledger.state
        assert (state.saved, state.batches, state.done.pairs()) == (4, {5: (10, 11)}, [2, 10])
        assert ledger.payload(100) == b"ahead"
        assert 101 not in state.running
        ledger.train(6, [100])


def test_a_ledger_without_a_number_goes_on(tmp_path: Path) -> None:
    """One of a run that began before ledgers had numbers, and one that nobody gave a number to check."""
    path = tmp_path / "ledger.bin"
    with RolloutLedger(path) as ledger:
        ledger.started(0, 0)
    with RolloutLedger(path, 0, run=RUN) as ledger:
        assert ledger.state.run is None
    written(tmp_path / "other.bin", steps=1, saved=1)
    with RolloutLedger(tmp_path / "other.bin", 1) as ledger:
        assert ledger.state.run == RUN
    with pytest.raises(ValueError, match="run is a number in"):
        RolloutLedger(path, 0, run=2**48)


def test_a_disk_that_is_full_when_the_ledger_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(ValueError, match=r"cannot grow \(No space left on device\): free some space"):
            RolloutLedger(tmp_path / "ledger.bin")
    with RolloutLedger(tmp_path / "ledger.bin", 0) as ledger:
        ledger.started(0, 0)

"""The replacement of a directory by another: a reader finds the old or the new one, whole, whenever the writer dies."""

import ctypes
import errno
import os
import shutil
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_THERE = (errno.ENOSYS, errno.EINVAL, errno.EXDEV, errno.EOPNOTSUPP)


def fresh_temporary(target: Path) -> Path:
    """Make an empty neighbour to write in, which `replace_directory` then moves to `target`.

    What a killed writer left is restored (the last whole directory) or deleted (a replaced or unfinished one).
    """
    if existing(target) != target:
        os.rename(_old_of(target), target)
    shutil.rmtree(_old_of(target), ignore_errors=True)
    temporary = temporary_of(target)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def temporary_of(target: Path) -> Path:
    """Return the path of that neighbour."""
    return target.with_name(target.name + ".writing")


def replace_directory(source: Path, target: Path) -> None:
    """Move `source`, which `fresh_temporary` made, to `target`; what was there is gone afterwards.

    1. Everything under source reaches the disk (fsync).
    2. Where target exists the two are swapped in one system call (Linux, most local file systems). Elsewhere target
       is first renamed to NAME.old: between the two renames only that exists, and `existing` finds it.
    3. The parent reaches the disk, and what was replaced is deleted.
    """
    _sync(source)
    old = _old_of(target)
    if not target.exists():
        os.rename(source, target)
    elif _exchange(source, target):
        old = source
    else:
        os.rename(target, old)
        os.rename(source, target)
    _sync_one(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def repeat_directory(source: Path, target: Path) -> None:
    """Put links to the files of `source` at `target` too, or copies where the disk has no links.

    A reader of `target` finds the old files or the new ones, as with `replace_directory`. Neither may be changed in
    place afterwards; deleting one leaves the other.
    """
    made = fresh_temporary(target)
    for path in source.iterdir():
        try:
            os.link(path, made / path.name)
        except OSError as error:
            if error.errno not in (*_NOT_THERE, errno.EPERM, errno.EMLINK):
                raise
            shutil.copy2(path, made / path.name)
    replace_directory(made, target)


def existing(target: Path) -> Path:
    """Return the last whole directory: `target`, or the one that a killed writer had set aside."""
    old = _old_of(target)
    return old if old.exists() and not target.exists() else target


def _old_of(target: Path) -> Path:
    return target.with_name(target.name + ".old")


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories atomically; return False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    paths = (os.fsencode(one), os.fsencode(other))
    if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_THERE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def _sync(folder: Path) -> None:
    """Write all files and directories under `folder` to the disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            _sync_one(Path(root) / name)
        _sync_one(Path(root))


def _sync_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

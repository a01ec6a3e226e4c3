"""A full disk as an error of one line: which directory, what was being written, and how the run goes on."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from apps.common.run.config_file import CONFIG_NAME
from apps.common.run.run_dir import resume_hint

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WORDS = re.compile(
    "No space left on device|Disk quota exceeded|File too large|os error (28|122|27)\\b"
    "|inline_container.*unexpected pos|PytorchStreamWriter failed writing"  # of torch, where a write was cut short
)
_TOLD = re.compile(r"FullDiskError: (.*)")
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
"""What writers raise; torch and safetensors say of a full disk in words alone."""


class FullDiskError(RuntimeError):
    """Nothing more can be written; the text names the directory, what was being written, and how to go on."""


@contextmanager
def writing(what: str, directory: Path, run_dir: Path | None = None) -> Iterator[None]:
    """Turn a full disk into one line. `run_dir`: the run's directory, where `directory` is not.

    Raises:
        FullDiskError: there is no space left. Other errors pass.
    """
    try:
        yield
    except WRITE_ERRORS as error:
        if isinstance(error, FullDiskError) or not is_full(error):
            raise
        run_dir = run_dir or directory
        if (run_dir.parent / CONFIG_NAME).is_file():  # of a warm start, which is resumed with its run
            run_dir = run_dir.parent
        raise FullDiskError(
            f"no space is left on the disk of {directory}: {what} could not be written. Make room; "
            f"{resume_hint(run_dir)}"
        ) from error


def is_full(error: BaseException | None) -> bool:
    """Return whether an error, or one that it came of, is that of a disk without space."""
    while error is not None:
        if (isinstance(error, OSError) and error.errno in FULL) or _WORDS.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def named_by_rank(error: BaseException) -> FullDiskError | None:
    """Return the line of a full disk that another process raised and this error quotes; None where it quotes none."""
    quoted = _TOLD.findall(str(error))
    return FullDiskError(quoted[-1]) if quoted else None

"""Memory that a process and all its descendants have taken, read from /proc."""

import os
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def half_of_memory() -> int:
    """Return half of the machine's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * _PAGE // 2


def resident_bytes(process: int) -> int:
    """Return what a process and its descendants have in memory, without files' pages; 0 where that can't be read.

    What siblings share since a fork counts once for each.
    """
    total, left = 0, [process]
    while left:
        folder = Path("/proc") / str(left.pop())
        try:
            _, resident, shared, *_ = map(int, (folder / "statm").read_text().split())
            children = [(task / "children").read_text() for task in (folder / "task").iterdir()]
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile, or there is no /proc
            continue
        total += (resident - shared) * _PAGE
        left += [int(child) for text in children for child in text.split()]
    return total

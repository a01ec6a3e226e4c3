"""Settings of glibc for memory that one step frees and the next one asks for again.

Other C libraries are left alone, and so is what the environment says (`MALLOC_TRIM_THRESHOLD_`,
`MALLOC_MMAP_THRESHOLD_`, `MALLOC_TOP_PAD_`, `GLIBC_TUNABLES`).
"""

import ctypes
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc
_USUAL_PAD = 128 << 10
_MADV_HUGEPAGE = 14  # mman.h of Linux
_HUGE = 2 << 20
_ADVISED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def keep_freed_memory() -> bool:
    """Let glibc keep freed blocks of up to 64 MiB, 1 GiB of them an arena; return whether it does.

    A step asks for the same blocks as the one before. glibc by default gives them back to the kernel, which clears
    each page that is asked for again (sampling 512 short answers: 6,500 page faults a step, below 200 with this).
    """
    libc = _glibc()
    return libc is not None and all(
        libc.mallopt(option, value) == 1 for option, value in ((_MMAP_THRESHOLD, 64 << 20), (_TRIM_THRESHOLD, 1 << 30))
    )


@cache
def use_huge_pages(room: int = 512 << 20) -> bool:
    """Ask for pages of 2 MiB for the next `room` bytes of the main thread's heap; return whether it worked.

    After `keep_freed_memory`, without which the heap shrinks again. Each tensor of a small model is some hundred pages
    of 4 KiB, and a step walks through all of them, each address looked up anew. The kernel is asked for what programs
    may ask for ("madvise"); where it gives huge pages to all or to none, nothing is done. Memory is taken when it is
    first used, as before.
    """
    libc = _glibc()
    with suppress(OSError):
        if libc is not None and "[madvise]" in _ADVISED.read_text():
            return _advise(libc, room)
    return False


def _advise(libc: Any, room: int) -> bool:
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    start: int = libc.sbrk(0)
    libc.mallopt(_TOP_PAD, room)
    blocks: list[Any] = []
    while libc.sbrk(0) == start and len(blocks) < 64:  # until what is free in the heap is used up and it grows
        blocks.append(libc.malloc(32 << 20))
    for block in blocks:
        libc.free(block)
    libc.mallopt(_TOP_PAD, _USUAL_PAD)
    first, last = -(-start // _HUGE) * _HUGE, libc.sbrk(0) // _HUGE * _HUGE
    return last - first >= room // 2 and bool(libc.madvise(first, last - first, _MADV_HUGEPAGE) == 0)


def _glibc() -> Any:
    """Return the C library where it is glibc and the environment does not set its memory, else None."""
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
    if any(name in os.environ for name in names):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") else None

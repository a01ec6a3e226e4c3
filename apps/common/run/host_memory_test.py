"""Page faults are counted, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from apps.common.run.host_memory import keep_freed_memory

MODULE = keep_freed_memory.__module__
FAULTS = f"""
import resource
from {MODULE} import keep_freed_memory
def faults(count=20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in range(1, count + 1):
        blocks = [b"1" * (size << 20) for _ in range(3)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
usual = faults()
kept = keep_freed_memory()
faults()
print(usual, faults(), kept)
"""


def printed(code: str, own: dict[str, str]) -> list[str]:
    """The words that a program prints, in an environment that says nothing of memory but its `own`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **own}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return run.stdout.split()


@pytest.mark.parametrize("own", [False, True])
def test_freed_memory_is_kept_for_the_next_step(own: bool) -> None:
    """Pages that the kernel clears again are counted; the environment's own word stands."""
    usual, later, kept = printed(FAULTS, {"MALLOC_TRIM_THRESHOLD_": "100000"} if own else {})
    assert kept == str(not own)
    assert int(usual) > 10_000
    assert (int(later) < int(usual) / 20) is not own


FRESH = f"""
import resource
from {MODULE} import keep_freed_memory, use_huge_pages
keep_freed_memory()
asked = use_huge_pages()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
blocks = [b"1" * (4 << 20) for _ in range(50)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, asked)
"""


@pytest.mark.parametrize("own", [False, True])
def test_the_heap_grows_by_huge_pages_where_programs_may_ask_for_them(own: bool) -> None:
    advised = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not advised.is_file() or "[madvise]" not in advised.read_text():
        pytest.skip("this kernel gives huge pages to all, or to none")
    faults, asked = printed(FRESH, {"MALLOC_TOP_PAD_": "131072"} if own else {})
    assert asked == str(not own)
    assert (int(faults) < 5_000) is not own, "51,200 pages of 4 KiB"

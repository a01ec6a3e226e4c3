"""One rank of a group that an outer launcher started, with heartbeats: `stalled_ranks.py CASE RANK FOLDER`.

What CASE says happens on RANK, while the others wait for it; each rank writes its number and its end in FOLDER.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from engines.launch import launch

STALL = 6.0
COLLECTIVE = 12.0
SLOW = 3 * STALL


def stopped() -> None:
    """Stop this process, as a machine that swaps, or an administrator does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def holds_the_interpreter() -> None:
    """Run for ever in code that no other thread of this process gets past."""
    re.search(r"(a+)+$", "a" * 60 + "b")


def loops_for_ever() -> None:
    """Run for ever in a loop of Python, beside which other threads run."""
    while True:
        pass


def is_slow() -> None:
    """Compute for longer than others may be silent: in Python, in torch, and asleep."""
    for work in (lambda: sum(range(1000)), lambda: torch.ones(300, 300) @ torch.ones(300, 300), lambda: time.sleep(1)):
        end = time.monotonic() + SLOW / 3
        while time.monotonic() < end:
            work()


def ends_first() -> None:
    """End long before the others."""


CASES = {case.__name__: case for case in (stopped, holds_the_interpreter, loops_for_ever, is_slow, ends_first)}


def work(case: str, rank: int, folder: Path) -> None:
    """Wait for the others, let the case happen, and wait for them again."""
    dist.barrier()
    (folder / f"pid{dist.get_rank()}").write_text(str(os.getpid()))
    if dist.get_rank() == rank:
        CASES[case]()
    elif case == "ends_first":
        time.sleep(SLOW)
    if case != "ends_first":
        dist.barrier()
    (folder / f"end{dist.get_rank()}").write_text("")


if __name__ == "__main__":
    late = COLLECTIVE if sys.argv[1] == "loops_for_ever" else None
    given = (sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    launch(work, given, device="cpu", timeout_seconds=late, stall_seconds=STALL)

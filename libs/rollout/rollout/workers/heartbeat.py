"""Processes that say nothing: they beat every second, and one that does not is told, with its stack, and killed."""

import faulthandler
import os
import signal
import sys
import time

HEARTBEAT = 1.0  # seconds


def dump_stack_on_signal() -> None:
    """Let this process write the stacks of its threads at SIGUSR1, whatever it is at."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def ask_stack(pid: int, why: str) -> None:
    """Write why a process is about to be killed, and have it write its stacks; one that is stopped can't."""
    sys.stderr.write(f"{why}; its stack, unless it is stopped:\n")
    sys.stderr.flush()
    os.kill(pid, signal.SIGUSR1)
    time.sleep(HEARTBEAT)

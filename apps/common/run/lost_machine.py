"""A machine that no longer answers, as an error of one line: which one, who noticed, and how the run goes on."""

import os
import re
import socket
from pathlib import Path

from apps.common.run.run_dir import resume_hint

_LOST = re.compile(
    "Connection (reset|closed) by peer|Broken pipe|Timed out waiting|[Ss]ocket [Tt]imeout|ncclRemoteError"
    "|remote process exited|Watchdog caught collective operation timeout"
)
_ADDRESS = re.compile(r"\[([0-9a-f.:]+)\]:\d+|(\d+\.\d+\.\d+\.\d+)<\d+>")


class LostMachineError(RuntimeError):
    """Another machine of the run no longer answers; the text names it and says how to go on."""


def lost_machine(error: BaseException, run_dir: Path) -> LostMachineError | None:
    """Return the line of an error of gloo's or NCCL's connections to another machine; None for another error, and where
    all ranks are here."""
    text = str(error)
    here, all_ranks = (os.environ.get(name, "1") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if here == all_ranks or not isinstance(error, RuntimeError) or not _LOST.search(text):
        return None
    address = _ADDRESS.search(text)
    other = f"the machine at {address[1] or address[2]}" if address else "another machine"
    return LostMachineError(
        f"{socket.gethostname()}, rank {os.environ['RANK']}: {other} no longer answers ({text.splitlines()[0]}). "
        f"Its own log says why; {resume_hint(run_dir)}"
    )

"""Ranks that start fast: forks of a server that has imported the engines once."""

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from typing import Any

from engines.launch import run_ranks

_PRELOAD = ["engines.build", "engines.tiny", "engines.weights.saving", "engines.prove.rank_measurements", "objectives"]
_MEGATRON = "engines.megatron.megatron_executor"


def launch_forked(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    world_size: int = 1,
    device: str = "cpu",
    timeout_seconds: float | None = None,
    within_seconds: float | None = None,
    megatron: bool = False,
) -> Any:
    """Run fn(*args) on `world_size` ranks of the CPU (or `device`), all of them forks, and return what rank 0 returned.

    It works as `engines.launch.launch`, whose spawned ranks import everything anew. megatron-core is imported once for
    all where the caller has imported some of it before its first call, or says that it is needed (`megatron`).
    TimeoutError where the ranks have not answered `within_seconds`; they are ended.
    """
    context = multiprocessing.get_context("forkserver")
    wanted = megatron or "megatron.core" in sys.modules
    context.set_forkserver_preload([*_PRELOAD, _MEGATRON] if wanted else _PRELOAD)
    return run_ranks(context, fn, args, world_size, device, 1, timeout_seconds, within_seconds)


def last_line(text: str) -> str:
    """Return the error of a rank's traceback."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), text)

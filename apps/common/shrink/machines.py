"""A shrunk run whose ranks torchrun started, on one machine or several: the first makes its model and data for all."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from apps.common.run.moved_weights import check_moved
from engines import EngineConfig
from engines.launch import ensure_group, under_torchrun
from engines.storage.disks import find_disks, share_files
from schedules.runtime.collectives import broadcast_result, rank_and_world
from seqpack.comm.plain import dataclasses_in

C = TypeVar("C")


def supplied_to_all(supply: Callable[[], C], run_dir: Path, engine: EngineConfig, given: C) -> C:
    """Return the configuration that the first rank supplied, with the files of the run folder on every disk.

    Collective under torchrun; else this process is the first. `given`: the configuration before, which has the same
    parts.
    """
    if not under_torchrun():
        return supply()
    ensure_group(engine.device, engine.collective_timeout_seconds)
    config = broadcast_result(supply() if rank_and_world()[0] == 0 else None, dataclasses_in(given))
    assert config is not None
    share_files(run_dir, find_disks(run_dir))
    return config


def tell_moved(run_dir: Path, engine: EngineConfig) -> None:
    """Print which weights moved; the first rank has them.

    Raises:
        IdleRunError: some that the run trains did not.
    """
    if rank_and_world()[0] == 0:
        sys.stdout.write(f"{check_moved(run_dir, engine)}\n")

"""One rank of a small run over several machines, under torchrun; rank 0 keeps the independent log.

torchrun ... -m apps.grpo.testing.on_machines RUN_DIR SCHEDULE STEPS MACHINES [--resume]
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from apps.common.cli import command_line as cli
from apps.common.run.checkpoints import last_checkpoint
from apps.grpo.config import GrpoConfig
from apps.grpo.main import run
from apps.grpo.testing.recipe import SHALLOW as RECIPE
from apps.grpo.testing.schedules import ASYNC, ONE, SYNC, note, small, watched

SCHEDULES = {schedule.mode: schedule for schedule in (SYNC, ONE, ASYNC)}
WAITS = 30
"""Seconds after which a collective is given up."""


def config_of(run_dir: Path, mode: str, steps: int, machines: int) -> GrpoConfig:
    """Return the configuration of a run over machines of one rank each."""
    # the task is soon learned: the rest of the steps may teach nothing
    config = small(run_dir, SCHEDULES[mode], steps=steps, save_every=4, eval_every=steps, allow_idle_steps=None)
    engine = replace(config.engine, allow_untested=("nodes",), collective_timeout_seconds=WAITS)
    pools = replace(config.cluster.pools, nodes=machines)
    return replace(config, engine=engine, cluster=replace(config.cluster, pools=pools))


def main(run_dir: Path, mode: str, steps: int, machines: int, resume: bool) -> None:
    """Run this rank to the end, or until something ends it."""
    if os.environ["RANK"] == "0":
        note(run_dir, {"from": (last_checkpoint(run_dir) or (0, None))[0] if resume else 0})
        watched(run_dir)
    run(replace(config_of(run_dir, mode, steps, machines), resume=resume), RECIPE)


if __name__ == "__main__":
    folder, name, most, count = sys.argv[1:5]
    cli.main(lambda: main(Path(folder), name, int(most), int(count), "--resume" in sys.argv))

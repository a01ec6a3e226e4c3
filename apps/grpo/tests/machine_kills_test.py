"""A machine of two is killed at a random moment, in each schedule, and the run goes on with the two in another order.

`MOMENTS=20` kills each schedule's run so often: by hand, as it takes a quarter of an hour a schedule.
"""

import os
import random
import time
from pathlib import Path

import pytest

from apps.common.run.config_file import CONFIG_NAME
from apps.common.testing.machines import machines, missing, start_torchrun
from apps.grpo.testing.on_machines import SCHEDULES, config_of
from apps.grpo.testing.schedules import assert_nothing_lost

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
MOMENTS = int(os.environ.get("MOMENTS", "1"))
SECONDS = 600


@pytest.mark.parametrize("mode", SCHEDULES)
def test_no_task_is_lost_or_trained_twice(mode: str, tmp_path: Path) -> None:
    draw = random.Random(f"{mode} 5")
    shared = tmp_path / "shared"
    shared.mkdir()
    run_dir, steps, kills = shared / "run", 30 * MOMENTS, 0
    program = ["-m", "apps.grpo.testing.on_machines", str(run_dir), mode, str(steps), "2"]
    for number in range(20 * MOMENTS):
        folder = tmp_path / str(number)
        with machines(2, folder, shared) as pair:
            order = draw.sample(pair, 2)
            resume = ["--resume"] if (run_dir / CONFIG_NAME).is_file() else []
            running = start_torchrun(order, 1, 29520, folder, [*program, *resume])
            if kills < MOMENTS:
                _wait_for_steps(run_dir, 0 if number == 0 else 1)
                time.sleep(draw.uniform(0, 6))
                if all(process.poll() is None for process in running):
                    victim = draw.randrange(2)
                    order[victim].kill()
                    kills += 1
                    assert running[1 - victim].wait(SECONDS) != 0, "the other machine went on alone"
                    continue
            codes = [process.wait(SECONDS) for process in running]
            if not any(codes):
                break
            pytest.fail("\n".join(path.read_text()[-3000:] for path in folder.glob("log*")))
    assert kills == MOMENTS, "the run was whole too soon"
    assert_nothing_lost(run_dir, config_of(run_dir, mode, steps, 2))


def _wait_for_steps(run_dir: Path, rows: int) -> None:
    """Wait until a run has begun: it has its configuration, or as many rows of metrics."""
    end = time.monotonic() + SECONDS
    path = run_dir / ("metrics.jsonl" if rows else CONFIG_NAME)
    while not path.is_file() and time.monotonic() < end:
        time.sleep(0.05)

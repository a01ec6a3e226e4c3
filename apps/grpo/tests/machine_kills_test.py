"""A machine of two is killed at a random moment, in each schedule, and the run goes on with the two in another order.

`MOMENTS=20` kills each schedule's run so often: by hand, as it takes a quarter of an hour a schedule.
"""

import os
import random
import time
from pathlib import Path

import pytest

from apps.common.run.checkpoints import last_checkpoint
from apps.common.run.config_file import CONFIG_NAME
from apps.common.testing.machines import machines, missing, start_torchrun
from apps.grpo.testing.on_machines import SCHEDULES, config_of
from apps.grpo.testing.schedules import assert_nothing_lost, log_of

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
MOMENTS = int(os.environ.get("MOMENTS", "1"))
SECONDS = 600


@pytest.mark.parametrize("mode", SCHEDULES)
def test_no_task_is_lost_or_trained_twice(mode: str, tmp_path: Path) -> None:
    draw = random.Random(f"{mode} 5")
    shared = tmp_path / "shared"
    shared.mkdir()
    run_dir, steps, kills = shared / "run", 100 * MOMENTS, 0
    for number in range(20 * MOMENTS):
        folder = tmp_path / str(number)
        with machines(2, folder, shared) as pair:
            order = draw.sample(pair, 2)
            resume = ["--resume"] if (run_dir / CONFIG_NAME).is_file() else []
            if kills == MOMENTS:
                steps = (last_checkpoint(run_dir) or (0, None))[0] + 20
            program = ["-m", "apps.grpo.testing.on_machines", str(run_dir), mode, str(steps), "2"]
            running = start_torchrun(order, 1, 29520, folder, [*program, *resume])
            if kills < MOMENTS:
                _wait_for_start(run_dir, number + 1)  # torchrun alone would wait for its peer by its own timeout
                time.sleep(draw.uniform(0, 8))
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


def _wait_for_start(run_dir: Path, starts: int) -> None:
    """Wait until rank 0 has written to the independent log that it begins for the time `starts`."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if log_of(run_dir).is_file() and log_of(run_dir).read_text().count('"from"') >= starts:
            return
        time.sleep(0.05)
    raise AssertionError("the run did not begin")

"""The default run with `--trainer.device npu`, from end to end, by the stand-in that computes on the CPU (by hand).

No Ascend hardware was at hand: this shows that nothing in a whole run leaves the device, and that it learns.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from apps.grpo.main import configure, run
from engines.fake_npu.build import reason_against
from engines.fake_npu.path import fake_npu_on_path
from engines.proofs.forked_ranks import launch_forked

pytestmark = pytest.mark.skipif(reason_against() is not None, reason=str(reason_against()))


def quickstart(run_dir: Path) -> tuple[float, float]:
    """What torchrun's only rank runs: held-out accuracy before and after."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # nobody connects: the group is there
    result = run(replace(configure(["--trainer.device", "npu"]), run_dir=run_dir))
    return result.accuracy_before, result.accuracy_after


def test_held_out_accuracy_rises_by_25_points(tmp_path: Path) -> None:
    """As on the CPU, whose run this is but for the attention kernel's rounding."""
    with fake_npu_on_path():
        before, after = launch_forked(quickstart, (tmp_path / "run",), device="npu")
    print(f"held-out {before:.1%} -> {after:.1%}")
    assert after >= before + 0.25

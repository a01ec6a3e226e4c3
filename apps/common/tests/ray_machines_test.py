"""Ray over machines that are namespaces of this one, with a token: ranks on two by one command, pools apart, and a
machine of samplers that is lost.

By hand, as root, a quarter of an hour: `./bazelw test --config=nodes //apps/common:tests/ray_machines_test`.
"""

import json
import time
from pathlib import Path

import pytest

from apps.common.testing.machines import missing
from apps.common.testing.ray_nodes import SECONDS, ray_nodes
from apps.grpo.testing.pools_on_machines import assert_separate_pools

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
SFT = ["-m", "apps.sft.main", "--demonstrations", "200", "--batch-size", "8", "--save-every", "2"]
NATIVE = ["--no-vllm", "--pools.placement", "separate", "--rollout.ray-workers", "2", "--trainer.device", "cpu"]
SMALL = [
    *("-m", "apps.grpo.main", "--warm-start.steps", "2", "--warm-start.eval-every", "2", "--prompts-per-step", "2"),
    *("--group-size", "4", "--eval-prompts", "4", "--allow-idle-steps", "None", "--save-every", "2"),
    *("--rollout.ray-workers", "1", "--pools.placement", "separate", "--pools.rollout-nodes", "1"),
    *("--schedule.mode", "one_step_off", "--objective.off-policy", "truncate", "--eval-every", "60"),
]
"""A sampler on a machine of its own."""


def test_one_command_trains_on_both_machines(tmp_path: Path) -> None:
    """Without a shared disk; what the two do not have is refused first."""
    with ray_nodes(tmp_path, (1, 1)) as nodes:
        words = [*SFT, "--launch", "ray", "--pools.nodes", "2", "--allow-untested", "nodes", "--run-dir", "run"]
        assert nodes.run([*words, "--nproc-per-node", "2"]) == 2
        assert "2 machines of 2 ranks need 2 CPU each, and 0 of the Ray cluster's 2 machines have that" in nodes.text
        assert nodes.run([*words, "--max-steps", "4"]) == 0, nodes.text
        for rank, machine in enumerate(nodes.machines):
            assert f"ranks {rank} to {rank} on machine{rank} ({machine.address})" in nodes.text
        assert "[rank 0] sft 4/4 " in nodes.text


def test_shards_go_from_each_machine_straight_to_samplers_on_a_third(tmp_path: Path) -> None:
    """By one command: ranks on two machines, a sampler on another, and the launcher's secret on all of them."""
    with ray_nodes(tmp_path, (1, 1, 1)) as nodes:
        run_dir = tmp_path / "shared/run"
        words = [*SMALL, "--schedule.weight-sync", "shards", "--max-steps", "2", "--run-dir", str(run_dir)]
        words += ["--launch", "ray", "--pools.nodes", "2", "--nproc-per-node", "1", "--allow-untested", "nodes"]
        assert nodes.run(words) == 0, nodes.text
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert [row["weights/version"] for row in rows[1:]] == [1, 2]
        assert all(row["weights/check/abs"] < 1e-4 for row in rows[1:])


def test_235b_samples_on_the_other_machine(tmp_path: Path) -> None:
    """By the native sampler; `ray_machines_vllm_test` has vLLM there."""
    assert_separate_pools(tmp_path, NATIVE)


def test_a_lost_machine_of_samplers_is_replaced(tmp_path: Path) -> None:
    """All its processes go at once; a further machine takes over, and the run ends as if nothing had been."""
    with ray_nodes(tmp_path, (1, 1, 1)) as nodes:
        run_dir = tmp_path / "shared/run"
        words = [*SMALL, "--max-steps", "60", "--run-dir", str(run_dir)]
        running, end = nodes.start(words), time.monotonic() + SECONDS
        while not (run_dir / "checkpoints/step-000002").exists():
            assert running.poll() is None, nodes.text
            assert time.monotonic() < end, nodes.text
            time.sleep(0.2)
        (lost,) = nodes.sampling()
        assert lost is not nodes.machines[0]
        lost.kill()
        assert running.wait(SECONDS) == 0, nodes.text
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(61))

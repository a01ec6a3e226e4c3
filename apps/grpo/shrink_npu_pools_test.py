"""Qwen3-235B, shrunk, with its pools apart: device npu trains, and vLLM samples on a node of its own in a Ray cluster.

Two nodes on this machine; the NPU is the stand-in that computes on the CPU. By hand:
`./bazelw test --config=vllm //apps/grpo:shrink_npu_pools_test`.
"""

import os

import pytest
from ray.cluster_utils import Cluster

from apps.grpo.schedule_testing import proofs
from apps.grpo.shrink_testing import NATIVE, ONE_POOL, check, run_whole
from engines.testing.npu.build import reason_against

REASON = f"needs vLLM (TESSERA_VLLM_PYTHON) and the stand-in for an NPU: {reason_against()}"
pytestmark = pytest.mark.skipif("TESSERA_VLLM_PYTHON" not in os.environ or reason_against() is not None, reason=REASON)
NAME = "qwen3-235b-a22b-async-npu"
FOUR_RANKS = (
    *("--engine.pipeline-parallel", "1", "--engine.first-stage-layers", "None"),
    *("--engine.last-stage-layers", "None"),
)
"""TP2, EP2, expert TP2; the stages are shrink_npu_ranks_test's."""


@pytest.fixture(scope="module")
def address():
    """Of a cluster: the node of training, and another one that samples."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    size = {"object_store_memory": 80 << 20}
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **size})
    found.add_node(num_cpus=1, **size)
    yield found.address
    found.shutdown()


def test_the_recipe_trains_on_several_ranks_beside_a_pool_of_its_own(address, tmp_path, capfd):
    """Fully asynchronous, pools separate, two copies in vLLM of two workers each, which share the experts: what flags
    leave out is the stages."""
    ray = ("--cluster.rollout.ray-workers", "1", "--cluster.rollout.ray-address", address)
    argv = ["--recipe", NAME, "--shrink=4", "--run-dir", str(tmp_path / "run"), *FOUR_RANKS]
    told, rows = run_whole([*argv, *ray], tmp_path, capfd)
    assert "--cluster.pools.rollout-nodes  8 -> 1" in told
    assert "--cluster.rollout.ep  64 -> 4" in told
    assert "--cluster.pools.placement" not in told
    assert [row["weights/version"] for row in rows] == [1, 2]
    assert max(proofs(rows)) < 0.05
    check(NAME, "bfloat16", told, rows, tmp_path / "run")


def test_samplers_in_ray_that_would_sample_on_an_npu_are_refused(tmp_path, capfd):
    ray = ("--cluster.rollout.ray-workers", "1")
    argv = ["--recipe", NAME, "--shrink=4", "--run-dir", str(tmp_path / "run"), *FOUR_RANKS, *NATIVE, *ONE_POOL, *ray]
    with pytest.raises(AssertionError, match=r"ray-workers on npu: no test has run .*set --engine.device cpu, or"):
        run_whole(argv, tmp_path, capfd)

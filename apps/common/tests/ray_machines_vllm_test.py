"""The shrunk recipe of 235B over machines that are namespaces of this one: one trains, vLLM samples on the others.

By hand, as root, a quarter of an hour: `./bazelw test --config=nodes //apps/common:tests/ray_machines_vllm_test`.
"""

import os
from pathlib import Path

import pytest

from apps.common.testing.machines import missing
from apps.grpo.testing.pools_on_machines import assert_separate_pools

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
    pytest.mark.skipif("TESSERA_VLLM_PYTHON" not in os.environ, reason="needs vLLM (TESSERA_VLLM_PYTHON)"),
]


def test_235b_samples_by_vllm_on_the_other_machine(tmp_path: Path) -> None:
    assert_separate_pools(tmp_path, [])


def test_its_vllm_spans_the_two_other_machines(tmp_path: Path) -> None:
    """One sampler whose tensor-parallel workers are one on each; its log-probs are checked after each weight sync."""
    spans = ["--rollout.ray-workers", "1", "--rollout.ray-nodes", "2", "--pools.rollout-nodes", "2"]
    one_copy = ["--rollout.data-parallel", "1", "--rollout.expert-parallel", "8"]
    assert_separate_pools(tmp_path, [*spans, *one_copy], machines=2)


def test_each_of_the_two_other_machines_has_a_stage_of_its_vllm(tmp_path: Path) -> None:
    """One sampler of two workers with half of the layers each."""
    stages = ["--rollout.ray-workers", "1", "--rollout.ray-nodes", "2", "--pools.rollout-nodes", "2"]
    stages += ["--rollout.tensor-parallel", "1", "--rollout.pipeline-parallel", "2"]
    one_copy = ["--rollout.data-parallel", "1", "--rollout.expert-parallel", "1"]
    assert_separate_pools(tmp_path, [*stages, *one_copy], machines=2)

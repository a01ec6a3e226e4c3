"""Scripts with images, whole but small: two ranks train a tower, two of vLLM's workers see by it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from apps.common.shrink.fields import ProcessLimit
from apps.common.testing.weight_delta import assert_trained
from apps.grpo.main import run_shrunk
from apps.grpo.registry import recipes
from apps.grpo.testing.schedules import rows

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)


@pytest.mark.parametrize("name", ["qwen3-5-27b-fsdp2", "qwen3-5-35b-a3b-fsdp2"])
def test_a_script_with_images_runs_from_end_to_end_through_two_workers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = recipes()[name].config
    run_dir = tmp_path / "run"
    assert run_shrunk(replace(config, steps=2, run_dir=run_dir), ProcessLimit(2)).steps == 2
    output = capsys.readouterr().out
    assert {line.split()[1] for line in output.splitlines() if line.startswith("flag")} == {"--max-steps"}
    steps = rows(run_dir)[1:]
    assert [row["weights/version"] for row in steps] == [1, 2]
    assert [row["rollout/failed_episodes"] for row in steps] == [0, 0]
    assert max(row["weights/check/abs"] for row in steps) < 0.04
    assert_trained(run_dir)

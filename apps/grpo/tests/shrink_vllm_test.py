"""Scripts with images, whole but small: two ranks train a tower, two of vLLM's workers see by it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from apps.common.shrink.fields import ProcessLimit
from apps.common.testing.weight_delta import load_tensors
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
    (tmp_path / "own.py").write_text("def parity(reply):\n    return float(len(reply.content) % 2)\n")
    own = replace(config.plugins, reward=f"{tmp_path}/own.py:parity")  # a random model is right about nothing
    run_dir = tmp_path / "run"
    assert run_shrunk(replace(config, plugins=own, steps=2, run_dir=run_dir), ProcessLimit(2)).steps == 2
    output = capsys.readouterr().out
    assert {line.split()[1] for line in output.splitlines() if line.startswith("flag")} == {"--reward", "--steps"}
    steps = rows(run_dir)[1:]
    assert [row["weights/version"] for row in steps] == [1, 2]
    assert [row["rollout/failed_episodes"] for row in steps] == [0, 0]
    assert max(row["weights/check/abs"] for row in steps) < 0.04
    before, after = (load_tensors(run_dir / at) for at in ("model", "export"))
    tower = [key for key in before if key.startswith("model.visual.")]
    assert sum(not before[key].equal(after[key]) for key in tower) > len(tower) / 2

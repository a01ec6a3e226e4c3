"""Recipes of several machines, shrunk, over two machines that are namespaces of this one and share no disk.

By hand, as root, a quarter of an hour: `./bazelw test --config=nodes //apps/common:tests/machine_recipes_test`.
"""

import json
from pathlib import Path

import pytest

from apps.common.testing.machines import machines, missing, start_torchrun

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
SECONDS = 1500
SHRUNK = {
    "grpo": ["--recipe", "qwen3-5-122b-a10b-megatron", "--no-vllm"],
    "sft": ["--recipe", "qwen3-5-397b-a17b-megatron"],
}


@pytest.mark.parametrize("app", SHRUNK)
def test_a_recipe_trains_every_weight_over_two_machines(app: str, tmp_path: Path) -> None:
    """Tensor, pipeline and expert parallelism of two each: pipelines and experts span the machines."""
    words = ["-m", f"apps.{app}.main", *SHRUNK[app], "--shrink", "--max-steps", "2", "--run-dir", "run"]
    with machines(2, tmp_path) as both:
        running = start_torchrun(both, 2, 29541, tmp_path, [*words, "--allow-untested", "nodes"])
        codes = [process.wait(SECONDS) for process in running]
        logs = [(tmp_path / f"log{number}").read_text() for number in range(2)]
        assert codes == [0, 0], [log[-3000:] for log in logs]
        both[0].start(["cp", "run/metrics.jsonl", str(tmp_path / "metrics")], tmp_path / "copies").wait(SECONDS)
    assert "2 nodes" in logs[0] or "--pools.nodes" in logs[0]
    assert "trained tensors differ from the start" in logs[0]
    assert "shrunk: the recipe's settings" not in logs[1], "the first rank tells the differences"
    steps = [row["step"] for row in map(json.loads, (tmp_path / "metrics").read_text().splitlines())]
    assert steps[-1] == 2

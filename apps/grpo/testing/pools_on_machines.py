"""The shrunk recipe of 235B with its two pools on different machines, which are namespaces of this one."""

import json
from collections.abc import Sequence
from pathlib import Path

from apps.common.testing.ray_nodes import ray_nodes
from apps.grpo.testing.shrink import ONE_RANK

LARGE = ["-m", "apps.grpo.main", "--recipe", "qwen3-235b-a22b-async-npu", "--shrink", "--max-steps", "2"]


def assert_separate_pools(folder: Path, sampler: Sequence[str], machines: int = 1) -> None:
    """Assert that one rank trains, fully asynchronously, by samplers in Ray that are on the machines that do not.

    `sampler`: the flags that choose it; `machines`: how many these are.
    """
    with ray_nodes(folder, (1, *(2 for _ in range(machines)))) as nodes:
        run_dir = folder / "shared/run"
        words = [*LARGE, *ONE_RANK, *sampler, "--run-dir", str(run_dir)]
        assert nodes.run(words) == 0, nodes.text
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert [row["weights/version"] for row in rows[1:]] == [1, 2]
        assert "trained tensors differ from the start" in nodes.text
        settings = json.loads((run_dir / "config.json").read_text())["cluster"]
        assert settings["pools"] | {"placement": "separate", "rollout_nodes": machines} == settings["pools"]

"""GRPO on images under Megatron, TP2·EP2: the scripts of 35B and 122B, shrunk, with the native sampler."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from apps.common.cluster import RolloutLayout
from apps.common.shrink.fields import ProcessLimit
from apps.common.testing.weight_delta import load_tensors
from apps.grpo.main import run_shrunk
from apps.grpo.registry import recipes

RECIPES = recipes()
STEPS = 3
SMALL_GAP = 1e-3
LAYOUTS = {
    "qwen3-5-35b-a3b-megatron": ("tensor_parallel", "expert_parallel"),
    "qwen3-5-122b-a10b-megatron": ("tensor_parallel", "pipeline_parallel", "expert_parallel"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_script_runs_from_end_to_end_with_a_frozen_tower(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it but vLLM."""
    config = RECIPES[name].config
    cluster = replace(config.cluster, rollout=RolloutLayout())
    for entry in cluster.env:
        monkeypatch.setenv(*entry.split("=", 1))
    run_dir = tmp_path / "run"
    settings = replace(config, cluster=cluster, steps=STEPS, run_dir=run_dir)
    assert run_shrunk(settings, ProcessLimit(8)).steps == STEPS
    output = capsys.readouterr().out
    assert "--trainer.vision" not in output
    assert "--engine.router" not in output
    used = json.loads((run_dir / "config.json").read_text())["engine"]
    assert [used[size] for size in LAYOUTS[name]] == [2] * len(LAYOUTS[name])
    assert (used["backend"], used["vision"]) == ("megatron", "frozen")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == STEPS + 1
    assert all(row["log_prob_difference_max"] < SMALL_GAP for row in rows[1:])
    before, after = (load_tensors(run_dir / at) for at in ("model", "export"))
    assert before.keys() == after.keys()
    changed = {key for key in before if not before[key].equal(after[key])}
    assert not any(key.startswith("model.visual.") for key in changed)
    assert len(changed) > len(before) / 4

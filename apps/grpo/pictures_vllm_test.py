"""Pictures shown to vLLM, from the recipe to the report: every hand-over reaches its tower, and is proven by images."""

import json
import os
from dataclasses import replace

import pytest
import torch

from apps.common.plan.cluster import Schedule
from apps.common.trained import tensors_of
from apps.grpo import picture_tasks
from apps.grpo.main import run
from apps.grpo.registry import recipes
from apps.grpo.samplers import WeightsNotTakenError
from rollout import VllmEngine

RECIPE = recipes()["quickstart-image-vllm"].config

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)


def small(run_dir, mode="sync"):
    """A run of three steps from random weights."""
    return replace(
        RECIPE,
        run_dir=run_dir,
        steps=3,
        prompts=8,
        group_size=4,
        eval_every=3,
        save_every=3,
        warm_start=replace(RECIPE.warm_start, steps=0),
        data=replace(RECIPE.data, eval_prompts=8),
        objective=replace(RECIPE.objective, off_policy="none" if mode == "sync" else "truncate"),
        cluster=replace(RECIPE.cluster, schedule=Schedule(mode)),
    )


def steps_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_a_run_trains_the_tower_and_vllm_sees_by_it(tmp_path, monkeypatch, mode):
    """Rewarded for what a random model does by halves: it is right about nothing."""
    monkeypatch.setattr(picture_tasks, "exact_reward", lambda content, _: float(len(content) % 2))
    run(small(tmp_path, mode))
    steps = steps_of(tmp_path)
    assert [row["weights/version"] for row in steps] == [1, 2, 3]
    assert [row["rollout/failed_episodes"] for row in steps] == [0, 0, 0]
    assert max(row["weights/probe/abs"] for row in steps) < 0.03
    if mode == "sync":
        assert max(row["log_prob_difference"] for row in steps) < 0.03
    before, after = (tensors_of(tmp_path / at) for at in ("model", "export"))
    tower = [name for name in before if ".visual." in name]
    assert tower
    assert sum(not torch.equal(before[name], after[name]) for name in tower) > len(tower) / 2


def test_a_tower_that_stays_old_stops_the_run(tmp_path, monkeypatch):
    """The probes show the step's pictures: those of text alone would not tell."""
    plain = VllmEngine.receive

    async def receive(self, bucket):
        for header in bucket.headers:
            if "visual.merger.linear_fc2.weight" in header.name:
                end = header.start + header.numel * header.dtype.itemsize
                part = bucket.buffer[header.start : end].view(header.dtype)
                part += 3 * torch.randn(part.shape, generator=torch.Generator().manual_seed(0))
        return await plain(self, bucket)

    monkeypatch.setattr(VllmEngine, "receive", receive)
    with pytest.raises(WeightsNotTakenError, match="does not sample from the trainer's weights"):
        run(small(tmp_path))

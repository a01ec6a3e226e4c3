"""The app over Megatron: four processes with tensor and pipeline parallelism come to one FSDP2 process' model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from apps.common.testing.weight_delta import assert_trained
from apps.grpo.main import configure, run
from apps.grpo.testing.recipe import SHALLOW as RECIPE

FLAGS = "--nproc-per-node 4 --trainer.backend megatron --parallel.tensor 2 --parallel.pipeline 2"
LAYOUT = ("backend", "tensor_parallel", "pipeline_parallel")


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())


def largest(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return max((value - right[name]).abs().max().item() for name, value in left.items())


def test_four_processes_come_to_the_same_model(tmp_path: Path) -> None:
    """`eps` is large: else a gradient of nearly zero moves a weight by the sign of its rounding error."""
    engine = replace(RECIPE.config.engine, eps=1e-3)
    data = replace(RECIPE.config.data, eval_prompts=1)
    short = replace(
        RECIPE.config, steps=2, eval_every=2, save_every=2, data=data, engine=engine, run_dir=tmp_path / "fsdp2"
    )
    settings = configure(["--recipe", "quickstart", *FLAGS.split()])
    run(short, RECIPE)
    engine = replace(engine, **{name: getattr(settings.engine, name) for name in LAYOUT})
    run(replace(short, engine=engine, nproc_per_node=settings.nproc_per_node, run_dir=tmp_path / "megatron"), RECIPE)
    for name in ("fsdp2", "megatron"):
        assert_trained(tmp_path / name, start=tmp_path / "fsdp2" / "model")
    want, got = rows(tmp_path / "fsdp2"), rows(tmp_path / "megatron")
    for left, right in zip(want[1:], got[1:], strict=True):
        for name in ("reward", "rollout/tokens", "train/sequences", "train/trained_tokens"):
            assert right[name] == pytest.approx(left[name], abs=1e-6)
        assert right["train/grad_norm"] == pytest.approx(left["train/grad_norm"], rel=1e-4)
        assert right["log_prob_difference_max"] < 1e-4
    before, stock, ours = (weights(tmp_path / name) for name in ("fsdp2/model", "fsdp2/export", "megatron/export"))
    assert largest(stock, ours) < 1e-5
    assert largest(before, ours) > 1e-3

"""GRPO of a model with experts: tokens are trained through the experts that they were sampled through."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from apps.common.testing.weight_delta import assert_trained
from apps.grpo.main import run
from apps.grpo.recipe import Recipe
from apps.grpo.recipes import quickstart
from apps.grpo.testing.recipe import RECIPE
from apps.quickstart.model import ensure_tiny_model
from engines.tiny import tiny_model


def mixture(folder: Path, seed: int) -> Path:
    """The quickstart's tokenizer, and a model with experts."""
    ensure_tiny_model(folder, seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model: Any = tiny_model("moe", vocab_size=len(tokenizer), **ends)
    model.save_pretrained(folder)
    return folder


def step_of(run_dir: Path, recipe: Recipe, replayed: bool, **changes: Any) -> dict[str, Any]:
    base = recipe.config
    engine = replace(base.engine, routing_replay=replayed)
    config = replace(base, run_dir=run_dir, engine=engine, steps=1, **changes)
    run(config, replace(recipe, make_model=mixture))
    row = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[1])
    return {name: row[name] for name in ("train/loss", "train/grad_norm", "train/expert_max_over_mean", "reward")}


def test_a_step_through_the_samplers_experts_is_the_trainers_own(tmp_path: Path) -> None:
    """The sampler's router is the trainer's; the engine refuses a batch that does not say what it chose."""
    own, replayed = (step_of(tmp_path / str(on), RECIPE, on) for on in (False, True))
    assert replayed == own
    assert_trained(tmp_path / "True")
    assert own["train/grad_norm"] > 0


def test_demonstrations_that_nobody_sampled_are_imitated_all_the_same(tmp_path: Path) -> None:
    base = quickstart.RECIPE.config
    warm = replace(base.warm_start, steps=3)
    few = replace(base.data, eval_prompts=8)
    step_of(tmp_path / "run", quickstart.RECIPE, True, warm_start=warm, data=few, prompts_per_step=4, group_size=4)
    assert_trained(tmp_path / "run" / "warm-start", start=tmp_path / "run" / "model")


def test_a_routers_loss_costs_no_pass_where_memory_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many forward passes run ahead as the plan finds memory for, which changes no number."""
    rows = []
    for given, said in ((None, "router's loss: --trainer.router-forwards-ahead 5, as many"), (0, None)):
        engine = replace(RECIPE.config.engine, router_aux_loss_coef=0.1, router_forwards_ahead=given)
        engine = replace(engine, max_tokens_per_rank=96)
        small = {"prompts_per_step": 3, "group_size": 2, "max_episode_tokens": 64}
        base = replace(RECIPE, config=replace(RECIPE.config, engine=engine))
        rows.append(step_of(tmp_path / str(given), base, False, **small))
        printed = capsys.readouterr().out
        assert said in printed if said else "router's loss" not in printed
    assert rows[0] == rows[1]

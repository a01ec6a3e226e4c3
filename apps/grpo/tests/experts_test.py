"""GRPO of a model with experts: tokens are trained through the experts that they were sampled through."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

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

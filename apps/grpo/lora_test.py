"""GRPO on adapters: the base under them is what the KL penalty holds the policy to."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from apps.common.trained import assert_trained
from apps.grpo.main import run
from apps.grpo.testing import RECIPE
from engines import LoraConfig
from objectives import GRPO


def small(run_dir, kl_coef, **changes):
    base = RECIPE.config
    engine = replace(base.engine, lora=LoraConfig(rank=4), lr=3e-2, warmup_steps=0)
    settings = {"steps": 2, "eval_every": 2, "engine": engine, "objective": GRPO(kl_coef=kl_coef), **changes}
    return replace(base, run_dir=run_dir, **settings)


def rows_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]


def test_the_policy_is_held_to_the_base(tmp_path):
    for name, kl_coef in (("free", 1e-9), ("held", 100.0)):
        run(small(tmp_path / name, kl_coef), RECIPE)
        assert_trained(tmp_path / name, only="_proj|in_proj")
    free, held = (rows_of(tmp_path / name) for name in ("free", "held"))
    assert free[0]["train/kl"] == held[0]["train/kl"] == 0.0  # an adapter begins as nothing
    assert free[1]["train/kl"] > 0.0
    assert free[1] != held[1]
    exports = [
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / name / "export").named_parameters())
        for name in ("free", "held")
    ]
    assert any(not torch.equal(exports[0][name], exports[1][name]) for name in exports[0])
    assert (tmp_path / "held" / "adapter" / "adapter_config.json").is_file()


def test_the_policy_is_held_to_a_frozen_model_beside_it(tmp_path):
    """With all weights trained: the first step is the model itself, later ones are held back, also after a resume."""
    for name, kl_coef in (("free", 1e-9), ("held", 100.0)):
        config = small(tmp_path / name, kl_coef, save_every=1)
        config = replace(config, engine=replace(config.engine, lora=LoraConfig(), lr=3e-3))
        run(config, RECIPE)
        run(replace(config, steps=3, resume=True), RECIPE)
        assert_trained(tmp_path / name)
    free, held = (rows_of(tmp_path / name) for name in ("free", "held"))
    assert free[0]["train/kl"] == pytest.approx(0.0, abs=1e-9)
    assert held[0]["train/kl"] == free[0]["train/kl"]
    assert free[1]["train/kl"] > 1e-4
    assert free[2]["train/kl"] > free[1]["train/kl"]  # a resumed run keeps the first reference
    assert held[2]["train/kl"] < free[2]["train/kl"]

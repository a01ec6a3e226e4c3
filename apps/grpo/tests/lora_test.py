"""GRPO on adapters: the base under them is what the KL penalty holds the policy to."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from apps.common.testing.weight_delta import assert_trained
from apps.grpo.config import GrpoConfig
from apps.grpo.main import run
from apps.grpo.step import GrpoTrainer
from apps.grpo.testing.recipe import RECIPE
from apps.quickstart.model import save_tiny_model
from engines import EngineConfig, LoraConfig, build_engine
from engines.adapters.lora import is_adapter
from engines.testing.executors import inside
from engines.tiny import tiny_batch, tiny_model
from objectives import GRPO, SFT
from rollout import NativeEngine, Sampling
from schedules.runtime.interrupts import Runner
from schedules.weights.weight_sync import sync_weights


def small(run_dir: Path, kl_coef: float, **changes: Any) -> GrpoConfig:
    base = RECIPE.config
    engine = replace(base.engine, lora=LoraConfig(rank=4), lr=3e-2, warmup_steps=0)
    settings = {"steps": 2, "eval_every": 2, "engine": engine, "objective": GRPO(kl_coef=kl_coef), **changes}
    return replace(base, run_dir=run_dir, **settings)


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]


def test_the_policy_is_held_to_the_base(tmp_path: Path) -> None:
    for name, kl_coef in (("free", 1e-9), ("held", 10.0)):
        config = small(tmp_path / name, kl_coef, steps=3)
        run(replace(config, engine=replace(config.engine, lr=1e-2)), RECIPE)  # at larger ones the penalty overshoots
        assert_trained(tmp_path / name, only="_proj|in_proj")
    free, held = (rows_of(tmp_path / name) for name in ("free", "held"))
    assert free[0]["train/kl"] == held[0]["train/kl"] < 1e-12  # an adapter begins as nothing; float32 rounds
    assert free[1]["train/kl"] > 1e-9  # after an update that the penalty has no part in yet
    assert held[2]["train/kl"] < free[2]["train/kl"]
    exports = [
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / name / "export").named_parameters())
        for name in ("free", "held")
    ]
    assert any(not torch.equal(exports[0][name], exports[1][name]) for name in exports[0])
    assert (tmp_path / "held" / "adapter" / "adapter_config.json").is_file()


def test_the_policy_is_held_to_a_frozen_model_beside_it(tmp_path: Path) -> None:
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


def test_the_sampler_is_handed_the_adapter_alone(tmp_path: Path) -> None:
    """And samples as from the merged weights, by the same bits; after a second hand-over too."""
    path = save_tiny_model(tmp_path / "model", 0)
    lora = LoraConfig(rank=4, alpha=8.0)
    engine = build_engine(EngineConfig(model=str(path), device="cpu", lr=3e-2, max_tokens_per_rank=64, lora=lora))

    trainer = GrpoTrainer(RECIPE.config, engine)

    def sampler() -> NativeEngine:
        return NativeEngine(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))

    alone, merged, untouched = sampler(), sampler(), sampler()
    asked = Sampling(max_new_tokens=12, seed=3)
    prompts = [[5, 9, 2, 30], [7] * 9]
    with Runner() as runner:
        for version in (1, 2):
            for seed in range(2):
                engine.train_batch(tiny_batch([20, 9, 14], seed=seed, vocab=60), SFT())
            size = sync_weights(trainer, alone, version, runner, module_names=True).nbytes
            adapters = [p for n, p in inside(engine).model.named_parameters() if is_adapter(n)]
            assert size == sum(p.numel() * p.element_size() for p in adapters)
            whole = list(engine.export_weights(live=True))
            assert size < sum(piece.flat.nbytes for piece in whole) / 4
            asyncio.run(merged.update_weights(version, whole))
            got, want, old = (one.generate_batch(prompts, asked) for one in (alone, merged, untouched))
            assert [(a.ids, a.log_probs) for a in got] == [(a.ids, a.log_probs) for a in want]
            assert [a.log_probs for a in got] != [a.log_probs for a in old]


def test_adapters_on_experts_are_handed_over_merged(tmp_path: Path) -> None:
    """The sampler has the experts' sums: log-probs are those of the trained policy, and no longer the base's."""
    model: Any = tiny_model("moe", num_hidden_layers=2)
    model.save_pretrained(tmp_path / "model")
    lora = LoraConfig(rank=4, targets=("q_proj",), target_parameters=("experts.gate_up_proj", "experts.down_proj"))
    settings: dict[str, Any] = {"model": str(tmp_path / "model"), "device": "cpu", "max_tokens_per_rank": 64}
    engine = build_engine(EngineConfig(**settings, lr=3e-2, lora=lora))
    sampler = NativeEngine(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32))
    for seed in range(3):
        engine.train_batch(tiny_batch([20, 9, 14], seed=seed), SFT())
    before = sampler.generate_batch([[5, 9, 2, 30]], Sampling(max_new_tokens=8, greedy=True))
    with Runner() as runner:
        sync_weights(GrpoTrainer(RECIPE.config, engine), sampler, 1, runner, module_names=True)
    engine.save_hf(tmp_path / "merged")
    merged = NativeEngine(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    asked = Sampling(max_new_tokens=8, seed=3)
    got, want = (one.generate_batch([[5, 9, 2, 30], [7] * 9], asked) for one in (sampler, merged))
    assert [(a.ids, a.log_probs) for a in got] == [(a.ids, a.log_probs) for a in want]
    after = sampler.generate_batch([[5, 9, 2, 30]], Sampling(max_new_tokens=8, greedy=True))
    assert [a.log_probs for a in after] != [a.log_probs for a in before]

"""Adapters on the text part of a model that sees images, against peft on stock transformers one sequence at a time."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from engines import EngineConfig, LoraConfig, TrainEngine, base_policy, build_engine, save_adapter
from engines.adapters.lora import is_adapter
from engines.testing.executors import inside
from engines.testing.one_rank import one_rank
from engines.testing.vision import (
    TOWER,
    as_stock,
    assert_close_gradients,
    gradients,
    samples,
    stock_loss,
    stock_scores,
    vision_model,
)
from engines.weights.row_shards import own_part
from objectives import SFT
from seqpack import make_batch

__all__ = ["one_rank"]


@pytest.fixture(params=["vision", "vision_moe"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    vision_model(request.param, num_hidden_layers=2).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def engine(path: Path, **options: Any) -> TrainEngine:
    settings: dict[str, Any] = {"device": "cpu", "lr": 1e-2, "max_tokens_per_rank": 40, "vision": "frozen"}
    return build_engine(EngineConfig(**settings | options, model=str(path), lora=LoraConfig(rank=3, alpha=7.0)))


def perturb(built: TrainEngine) -> TrainEngine:
    """Leave nothing as it was initialised: B is zero, so that A would have no gradient."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in inside(built).model.named_parameters():
            if is_adapter(name):
                local = own_part(parameter).part
                local.add_(torch.randn(local.shape, generator=generator) * 0.1)
    return built


def stock(path: Path, folder: Path) -> tuple[Any, Any]:
    made = as_stock(AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32))
    return made, peft.PeftModel.from_pretrained(made, folder, is_trainable=True).eval()


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"batching": "padded"}])
def test_log_probs_and_gradients_are_those_of_peft(base: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    rows, built = samples(), perturb(engine(base, **options))
    save_adapter(built, tmp_path / "adapter")
    made, adapted = stock(base, tmp_path / "adapter")
    scores = torch.cat(stock_scores(adapted, rows, made))
    got = built.forward(make_batch(rows))["log_probs"].values()
    assert float((got - scores).detach().abs().max()) < 1e-5
    stock_loss(adapted, rows, made).backward()
    want = {n: p.grad for n, p in adapted.named_parameters() if p.requires_grad}
    own = {f"base_model.model.{n}.default.weight": g for n, g in gradients(built, make_batch(rows)).items()}
    assert own.keys() == want.keys()
    assert all(".language_model.layers." in name for name in own)
    assert_close_gradients(own, want)


def test_the_tower_and_the_base_stay_bit_for_bit(base: Path, tmp_path: Path) -> None:
    built, before = engine(base, lr=0.1), load_file(base / "model.safetensors")
    first = built.forward(make_batch(samples()))["log_probs"].values()
    for step in range(2):
        built.train_batch(make_batch(samples(10 * step)), SFT())
    assert not torch.equal(built.forward(make_batch(samples()))["log_probs"].values(), first)
    with base_policy(built):
        assert torch.equal(built.forward(make_batch(samples()))["log_probs"].values(), first)
    built.save_hf(tmp_path / "merged")
    after = load_file(tmp_path / "merged/model.safetensors")
    assert after.keys() == before.keys()
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert changed
    assert not [name for name in changed if name.startswith(TOWER)]
    again = as_stock(AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    with torch.no_grad():
        wanted = torch.cat(stock_scores(again, samples()))
    assert float((built.forward(make_batch(samples()))["log_probs"].values() - wanted).abs().max()) < 1e-5


def test_a_checkpoint_of_adapters_is_resumed(base: Path, tmp_path: Path) -> None:
    built = engine(base)
    built.train_batch(make_batch(samples()), SFT())
    built.save(tmp_path / "saved")
    straight = built.train_batch(make_batch(samples(10)), SFT())["loss"]
    resumed = engine(base)
    resumed.load(tmp_path / "saved")
    assert resumed.train_batch(make_batch(samples(10)), SFT())["loss"] == straight

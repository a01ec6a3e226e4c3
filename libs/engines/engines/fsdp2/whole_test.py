"""Weights that one process on a CPU holds whole are trained, written and read as those that FSDP2 holds for it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from engines import EngineConfig, build_engine
from engines.proofs.family_cases import CASES, Case
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT

LENGTHS = [7, 3, 12, 5, 9, 2]


def batch(seed: int, vocab: int = 48) -> Any:
    return tiny_batch(LENGTHS, seed=seed, vocab=vocab)


def engine(weights: str, module: Any, **options: Any) -> Any:
    config: dict[str, Any] = {"lr": 1e-2, "grad_clip": 0.5, "max_tokens_per_rank": 20, "weights": weights, **options}
    return build_engine(EngineConfig(device="cpu", **config), module)


def sharded(built: Any) -> bool:
    kinds = {isinstance(parameter, DTensor) for parameter in built.executor.scorer.parameters()}
    assert len(kinds) == 1
    return kinds.pop()


def exported(built: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in built.executor.tensors()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_and_exports_are_the_same_to_the_bit(case: Case) -> None:
    """Of every family, in several micro-batches, where gradients are clipped."""
    vocab = case.config().get_text_config().vocab_size
    curves, exports = [], []
    for weights in ("auto", "sharded"):
        built = engine(weights, case.model())
        assert sharded(built) is (weights == "sharded")
        curves.append([built.train_batch(batch(seed, vocab), SFT()) for seed in range(3)])
        exports.append(exported(built))
    for own, other in zip(*curves, strict=True):
        assert (own["loss"], own["grad_norm"]) == (other["loss"], other["grad_norm"])
        assert own["grad_norm"] > 0.5
    assert exports[0].keys() == exports[1].keys()
    assert all(torch.equal(tensor, exports[1][name]) for name, tensor in exports[0].items())


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize(("first", "then"), [("auto", "sharded"), ("sharded", "auto")])
def test_each_goes_on_from_the_others_checkpoint(tmp_path: Path, kind: Any, first: str, then: str) -> None:
    straight = engine(first, tiny_model(kind, seed=0))
    wanted = [straight.train_batch(batch(seed), SFT())["loss"] for seed in range(4)]
    built = engine(first, tiny_model(kind, seed=0))
    assert [built.train_batch(batch(seed), SFT())["loss"] for seed in range(2)] == wanted[:2]
    built.save(tmp_path / "one")
    other = engine(then, tiny_model(kind, seed=1))
    other.load(tmp_path / "one")
    assert [other.train_batch(batch(seed), SFT())["loss"] for seed in (2, 3)] == wanted[2:]
    want = exported(straight)
    assert all(torch.equal(tensor, want[name]) for name, tensor in exported(other).items())


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer_on_host": True},
        {"moments_dtype": "bfloat16"},
        {"gradient_checkpointing": True, "activation_offload": True},
        {"batching": "padded"},
    ],
    ids=str,
)
def test_settings_do_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    """Steps, a move away and back, and checkpoints from which the other way goes on."""
    runs = []
    for weights, other in (("auto", "sharded"), ("sharded", "auto")):
        built = engine(weights, tiny_model("dense", seed=0), **options)
        losses = [built.train_batch(batch(seed), SFT())["loss"] for seed in range(2)]
        built.offload()
        built.onload()
        built.save(tmp_path / weights)
        resumed = engine(other, tiny_model("dense", seed=1), **options)
        resumed.load(tmp_path / weights)
        runs.append((losses, *(one.train_batch(batch(2), SFT())["loss"] for one in (built, resumed))))
        assert runs[-1][1] == runs[-1][2]
    assert runs[0] == runs[1]


def test_a_model_on_disk_keeps_its_tied_head(tmp_path: Path) -> None:
    model: Any = tiny_model("dense", seed=0)
    model.save_pretrained(tmp_path)
    curves = []
    for weights in ("auto", "sharded"):
        built = engine(weights, None, model=str(tmp_path))
        live = built.executor.model
        assert live.get_output_embeddings().weight is live.get_input_embeddings().weight
        curves.append([built.train_batch(batch(seed), SFT())["loss"] for seed in range(2)])
    assert curves[0] == curves[1]


@pytest.mark.parametrize(
    "change",
    [{"dtype": "bfloat16"}, {"master_dtype": "bfloat16"}, {"parameters_on_host": True, "optimizer_on_host": True}],
    ids=str,
)
def test_fsdp2_stays_where_it_has_something_to_do(change: dict[str, Any]) -> None:
    assert sharded(engine("auto", tiny_model("dense"), **change))

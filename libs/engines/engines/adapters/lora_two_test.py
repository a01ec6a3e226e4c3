"""Adapters on two gloo processes, with and without shared sequences, equal one process. One start for all cases."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engines import EngineConfig, LoraConfig, TrainEngine, build_engine
from engines.adapters.lora import is_adapter, whole
from engines.proofs.forked_ranks import launch_forked
from engines.testing.executors import inside
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT

LENGTHS = [29, 3, 12, 5, 17, 2, 1, 6, 4]
MODES = ["off", "static:2", "dynamic"]
EXPERTS = "experts"
STACKED = LoraConfig(rank=3, target_parameters=("experts.gate_up_proj", "experts.down_proj"))


Found = tuple[dict[str, Any], dict[str, Any], float]  # of one rank, of two by mode, and of one that goes on


def engine(mode: Any = "off") -> TrainEngine:
    # A large eps: with Adam's usual one a gradient of nearly zero moves a weight by its rounding error's sign.
    torch.manual_seed(3)
    config = EngineConfig(
        device="cpu",
        lr=1e-2,
        eps=1e-2,
        max_tokens_per_rank=32,
        context_parallel="off" if mode == EXPERTS else mode,
        weight_decay=0.1,
        lora=STACKED if mode == EXPERTS else LoraConfig(rank=3),
    )
    return build_engine(config, tiny_model("moe" if mode == EXPERTS else "dense", scale=2.0, num_hidden_layers=2))


def results_of(built: TrainEngine, folder: Path | None = None) -> dict[str, Any]:
    out: dict[str, Any] = {
        "loss": [built.train_batch(tiny_batch(LENGTHS, seed=step), SFT())["loss"] for step in range(2)]
    }
    out["scores"] = built.forward(tiny_batch(LENGTHS))["log_probs"].values().clone()
    out["weights"] = {piece.name: piece.flat.clone() for piece in built.export_weights(max_bytes=2**40)}
    out["adapters"] = {n: whole(p.detach()).clone() for n, p in inside(built).model.named_parameters() if is_adapter(n)}
    out["base"] = inside(built)._base()
    if folder is not None:
        built.save(folder / "checkpoint")
    return out


def on_two(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {mode: results_of(engine(mode), folder if mode == "off" else None) for mode in MODES}
    results[EXPERTS] = results_of(engine(EXPERTS))
    again = engine()
    again.load(folder / "one")  # what one rank wrote
    results["next"] = again.train_batch(tiny_batch(LENGTHS, seed=9), SFT())["loss"]
    return results


def alone(folder: Path) -> dict[str, Any]:
    built = engine()
    out = results_of(built)
    built.save(folder / "one")
    out[EXPERTS] = results_of(engine(EXPERTS))
    out["next"] = built.train_batch(tiny_batch(LENGTHS, seed=9), SFT())["loss"]
    return out


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("lora")
    one = launch_forked(alone, (folder,), 1)
    two = launch_forked(on_two, (folder,), 2)
    other = launch_forked(loaded, (folder,), 1)
    return one, two, other


def loaded(folder: Path) -> float:
    built = engine()
    built.load(folder / "checkpoint")  # what two ranks wrote
    return built.train_batch(tiny_batch(LENGTHS, seed=9), SFT())["loss"]


@pytest.mark.parametrize("mode", [*MODES, EXPERTS])
def test_two_ranks_equal_one(found: Found, mode: str) -> None:
    one, two = found[0][EXPERTS] if mode == EXPERTS else found[0], found[1][mode]
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
    torch.testing.assert_close(two["scores"], one["scores"], atol=1e-4, rtol=0)
    for kind in ("adapters", "weights"):
        for name, tensor in one[kind].items():
            torch.testing.assert_close(two[kind][name], tensor, atol=2e-5, rtol=0, msg=f"{kind} {name}")
    assert torch.equal(two["base"], one["base"])


def test_a_checkpoint_of_either_goes_on_with_the_other(found: Found) -> None:
    one, two, other = found
    assert two["next"] == pytest.approx(one["next"], abs=1e-5)
    assert other == pytest.approx(one["next"], abs=1e-5)

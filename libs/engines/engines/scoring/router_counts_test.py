"""How many forward passes a router's loss costs, and that what they spare changes no number."""

from typing import Any

import pytest
import torch

from engines import EngineConfig, build_engine
from engines.proofs.forked_ranks import launch_forked
from engines.testing.one_rank import one_rank  # noqa: F401
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT
from seqpack.batches.batch import jagged
from seqpack.batches.schema import ROUTED_EXPERTS

LENGTHS = [37, 5, 9, 21, 2, 30]
LAYERS = 4


def trained(options: dict[str, Any], replay: str = "", cap: int = 40) -> tuple[dict[str, float], int, int]:
    """Return metrics, calls of layers and calls of the head of a step; `replay`: "all" experts are given, or "some"."""
    model: Any = tiny_model("moe", num_hidden_layers=LAYERS)
    options = {"device": "cpu", "lr": 1e-2, "recheck_rows": 0, **options}
    config = EngineConfig(max_tokens_per_rank=cap, routing_replay=bool(replay), **options)
    engine: Any = build_engine(config, model)
    calls = {"layer": 0, "head": 0}
    for layer in model.base_model.layers:
        layer.register_forward_hook(lambda *_: calls.__setitem__("layer", calls["layer"] + 1))
    score = engine.executor.scorer.log_probs

    def scored(*arguments: Any, **named: Any) -> Any:
        calls["head"] += 1
        return score(*arguments, **named)

    engine.executor.scorer.log_probs = scored
    batch = tiny_batch(LENGTHS)
    if replay:
        rows = [torch.tensor([0, 1], dtype=torch.int16).expand(n, LAYERS, 2).clone() for n in LENGTHS]
        if replay == "some":
            rows[2][3] = -1
        batch[ROUTED_EXPERTS] = jagged(rows, 0)
    return engine.train_batch(batch, SFT()), calls["layer"], calls["head"]


@pytest.mark.parametrize(
    ("options", "replay", "passes"),
    [
        ({"router_aux_loss_coef": 0.0}, "", 0),
        ({"router_aux_loss_coef": 0.5}, "", -1),
        ({"router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.1}, "", 0),
        ({"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}, "all", 0),
        ({"router_aux_loss_coef": 0.5}, "some", -1),
    ],
    ids=["none", "balancing", "z-loss", "replay", "replay of some"],
)
def test_forward_passes_beside_those_that_train(
    options: dict[str, Any],
    replay: str,
    passes: int,
    one_rank: None,  # noqa: F811
) -> None:
    """None, or all micro-batches but one (-1), without the head; loss and gradient are those of one micro-batch."""
    metrics, layers, heads = trained(options, replay)
    count = int(metrics["micro_batches"])
    assert count > 2
    assert layers == LAYERS * (count + (count - 1) * abs(passes))
    assert heads == count
    whole = trained(options, replay, cap=1000)[0]
    assert whole["micro_batches"] == 1
    for key in ("loss", "grad_norm", *(["auxiliary_loss"] if "auxiliary_loss" in whole else [])):
        assert metrics[key] == pytest.approx(whole[key], rel=1e-5), key


@pytest.mark.parametrize("ahead", [1, 2, 100])
def test_forward_passes_that_run_ahead_spare_those_that_count(ahead: int, one_rank: None) -> None:  # noqa: F811
    """A forward pass each, none beside where all run ahead, and the numbers of one micro-batch."""
    options: dict[str, Any] = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}
    metrics, layers, heads = trained({**options, "router_forwards_ahead": ahead})
    count = int(metrics["micro_batches"])
    assert count > 2
    assert layers == LAYERS * (count + max(0, count - 1 - ahead))
    assert heads == count
    for other in (trained(options)[0], trained(options, cap=1000)[0]):
        for key in ("loss", "grad_norm", "auxiliary_loss"):
            assert metrics[key] == pytest.approx(other[key], rel=1e-5), key


def test_forward_passes_ahead_of_nothing_are_refused(one_rank: None) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="router_forwards_ahead spares the pass that a router's balancing loss needs"):
        trained({"router_aux_loss_coef": 0.0, "router_forwards_ahead": 1})


def metrics_of(options: dict[str, Any], replay: str) -> dict[str, float]:
    return trained(options, replay)[0]


@pytest.mark.parametrize("weights", ["sharded", "replicated"])
def test_ranks_whose_forward_passes_run_ahead_give_the_numbers_of_one(weights: str, one_rank: None) -> None:  # noqa: F811
    options: dict[str, Any] = {"router_aux_loss_coef": 0.5}
    alone = metrics_of(options, "")
    two = launch_forked(metrics_of, ({**options, "router_forwards_ahead": 1, "weights": weights}, ""), 2)
    for key in ("loss", "grad_norm", "auxiliary_loss"):
        assert two[key] == pytest.approx(alone[key], rel=3e-5), key


@pytest.mark.parametrize("replay", ["all", "some", ""])
def test_ranks_agree_on_what_needs_a_pass(replay: str, one_rank: None) -> None:  # noqa: F811
    """One rank has tokens whose experts are not given, and both run the pass."""
    options = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}
    alone, two = metrics_of(options, replay), launch_forked(metrics_of, (options, replay), 2)
    for key in ("loss", "grad_norm", "auxiliary_loss"):
        assert two[key] == pytest.approx(alone[key], rel=3e-5), key

"""How many forward passes a router's loss costs, and that what they spare changes no number."""

from typing import Any

import pytest
import torch

from engines import EngineConfig, base_policy, build_engine
from engines.lora_config import LoraConfig
from engines.proofs.forked_ranks import launch_forked
from engines.testing.one_rank import one_rank  # noqa: F401
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT
from seqpack.batches.batch import jagged
from seqpack.batches.schema import ROUTED_EXPERTS

LENGTHS = [37, 5, 9, 21, 2, 30]
LAYERS = 4


def built(options: dict[str, Any], cap: int = 40) -> tuple[Any, dict[str, int]]:
    """Return an engine, and the calls of its layers so far."""
    model: Any = tiny_model("moe", num_hidden_layers=LAYERS)
    options = {"device": "cpu", "lr": 1e-2, "recheck_rows": 0, **options}
    engine: Any = build_engine(EngineConfig(max_tokens_per_rank=cap, **options), model)
    calls = {"layer": 0}
    if engine.config.backend == "megatron":
        layers = [layer for stage in engine.executor.stages for layer in stage.decoder.layers]
    else:
        layers = [*model.base_model.layers]
    for layer in layers:
        layer.register_forward_hook(lambda *_: calls.__setitem__("layer", calls["layer"] + 1))
    return engine, calls


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


BALANCED: dict[str, Any] = {"router_aux_loss_coef": 0.5, "router_forwards_ahead": 0}


def updated(options: dict[str, Any], scored: bool) -> tuple[list[dict[str, float]], list[int]]:
    """Return the metrics of two updates of a batch, and the calls of layers in each; `scored`: the batch, before."""
    engine, calls = built({**BALANCED, **options})
    batch, results, counts = tiny_batch(LENGTHS), [], []
    if scored:
        engine.forward(batch)
    for _ in range(2):
        before = calls["layer"]
        results.append(engine.train_batch(batch, SFT()))
        counts.append(calls["layer"] - before)
    return results, counts


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_a_scoring_pass_counts_for_the_next_update(backend: str, one_rank: None) -> None:  # noqa: F811
    """No layer runs beside those that train; a second update, by other weights, counts for itself."""
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    want, passes = updated({"backend": backend}, scored=False)
    got, fewer = updated({"backend": backend}, scored=True)
    count = int(got[0]["micro_batches"])
    assert count > 2
    assert fewer == [LAYERS * count, passes[1]]
    assert passes[0] == passes[1] == LAYERS * (2 * count - 1)
    assert got == want


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "sharded"},
        {"weights": "replicated"},
        {"context_parallel": "static:2"},
        {"backend": "megatron", "pipeline_parallel": 2},
        {"backend": "megatron", "tensor_parallel": 2},
    ],
    ids=str,
)
def test_ranks_take_the_counts_of_a_scoring_pass(options: dict[str, Any], one_rank: None) -> None:  # noqa: F811
    if options.get("backend") == "megatron":
        pytest.importorskip("megatron.core")
    alone = updated({}, scored=False)[0]
    two, calls = launch_forked(updated, (options, True), 2)
    assert calls[0] < calls[1]
    for want, got in zip(alone, two, strict=True):
        for key in ("loss", "grad_norm", "auxiliary_loss"):
            assert got[key] == pytest.approx(want[key], rel=3e-5), key


def test_counts_of_other_tokens_weights_or_a_base_are_not_taken(one_rank: None) -> None:  # noqa: F811
    """Nor of a batch that was written into, nor of the base of an adapter."""
    lora = LoraConfig(rank=4, targets=("q_proj", "v_proj"))
    for change in ("tokens", "in place", "batch", "base"):
        engine, calls = built({**BALANCED, **({"lora": lora} if change == "base" else {})})
        batch, scored = tiny_batch(LENGTHS), tiny_batch(LENGTHS, seed=1)
        if change == "base":
            with base_policy(engine) as base:
                base.forward(batch)
        elif change == "in place":
            engine.forward(batch)
            batch["input_ids"].values()[3] += 1
        else:
            engine.forward(scored if change == "tokens" else tiny_batch([*reversed(LENGTHS)]))
        before = calls["layer"]
        count = int(engine.train_batch(batch, SFT())["micro_batches"])
        assert calls["layer"] - before == LAYERS * (2 * count - 1), change

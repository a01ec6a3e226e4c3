"""The router's loss equals transformers' on one batch, in any micro-batches, on any ranks, packed or padded."""

import copy
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from engines import EngineConfig, TrainEngine, build_engine
from engines.families.router import RouterCounts, RouterLoss
from engines.launch import ensure_group
from engines.proofs.forked_ranks import launch_forked
from engines.proofs.plain_executor import build_plain_engine
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch, tiny_model
from objectives import GRPO, SFT
from seqpack.batches.batch import jagged

LENGTHS = [7, 3, 12, 5, 9, 2, 14, 6]
KINDS = ["moe", "next"]


def model(kind: str = "moe", coefficient: float = 0.5, **changes: Any) -> Any:
    return tiny_model(
        kind, scale=2.0, num_hidden_layers=2, output_router_logits=True, router_aux_loss_coef=coefficient, **changes
    )


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"device": "cpu", "lr": 1e-2, "eps": 1e-2, "weight_decay": 0.0, "grad_clip": None, **options})


def weights(built: TrainEngine) -> dict[str, torch.Tensor]:
    return {part.name: part.flat.clone() for part in built.export_weights(max_bytes=2**40)}


def stock_step(stock: Any, batch: TensorDict) -> tuple[float, float, float]:
    """Transformers' own loss on the padded batch, its labels and router included, and torch's AdamW."""
    ids = batch["input_ids"].to_padded_tensor(0)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for i, (row, trained) in enumerate(zip(batch["input_ids"].unbind(), batch["loss_mask"].unbind(), strict=True)):
        mask[i, : len(row)] = 1
        labels[i, : len(row)] = torch.where(trained, row, -100)
    optimizer = torch.optim.AdamW(stock.parameters(), lr=1e-2, betas=(0.9, 0.98), eps=1e-2, weight_decay=0.0)
    output = stock(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
    output.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), float("inf"))
    optimizer.step()
    return output.loss.item(), output.aux_loss.item(), norm.item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("coefficient", [0.001, 0.5, 100.0])
@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens_per_rank": 1000},
        {"max_tokens_per_rank": 15},
        {"max_tokens_per_rank": 15, "gradient_checkpointing": True},
        {"max_tokens_per_rank": 31, "batching": "padded"},
        {"max_tokens_per_rank": 15, "router_forwards_ahead": 1},
        {"max_tokens_per_rank": 15, "gradient_checkpointing": True, "router_forwards_ahead": 100},
    ],
    ids=["one", "many", "recomputed", "padded", "one ahead", "all ahead"],
)
def test_one_step_equals_transformers_on_the_whole_batch(
    kind: str, coefficient: float, options: dict[str, Any]
) -> None:
    batch = tiny_batch(LENGTHS)
    stock = copy.deepcopy(model(kind, coefficient)).train()
    loss, auxiliary, norm = stock_step(stock, batch)
    built = build_engine(config(**options), model(kind, coefficient))
    result = built.train_batch(batch, SFT())
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert result["auxiliary_loss"] == pytest.approx(coefficient * auxiliary, rel=1e-5)
    assert result["grad_norm"] == pytest.approx(norm, rel=1e-4)
    live = {part.name: part.flat for part in built.export_weights(2**40, live=True)}
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(live[name].view_as(parameter), parameter.data, atol=1e-5, rtol=1e-4, msg=name)


def test_the_coefficient_counts() -> None:
    losses = [
        build_engine(config(), model(coefficient=c)).train_batch(tiny_batch(LENGTHS), SFT())["loss"]
        for c in (0.0, 1.0, 10.0)
    ]
    assert losses[1] > losses[0] + 0.5
    assert losses[2] - losses[0] == pytest.approx(10 * (losses[1] - losses[0]), rel=1e-4)


@pytest.mark.parametrize("coefficient", [0.0, 3.0])
def test_the_engines_coefficient_is_said_in_place_of_the_configs(coefficient: float) -> None:
    batch = tiny_batch(LENGTHS)
    want = build_engine(config(), model(coefficient=coefficient)).train_batch(batch, SFT())
    for own in (1.0, 0.0):
        built = build_engine(config(router_aux_loss_coef=coefficient), model(coefficient=own))
        assert built.train_batch(batch, SFT()) == want
    with pytest.raises(ValueError, match="router_aux_loss_coef is for models with experts, qwen3_5_text has none"):
        build_engine(config(router_aux_loss_coef=coefficient), tiny_model("dense"))


def test_rows_without_another_gradient_have_the_routers() -> None:
    """What an objective calls a row without a gradient still has one of the router's loss."""
    batch = tiny_batch(LENGTHS)
    batch["advantages"] = jagged([0 * row for row in batch["advantages"].unbind()])
    result = build_engine(config(), model()).train_batch(batch, GRPO())
    assert result["computed_sequences"] == len(LENGTHS)
    assert result["grad_norm"] > 0
    assert result["auxiliary_loss"] > 0


def test_scoring_and_models_that_do_not_ask_pay_nothing() -> None:
    built = build_engine(config(), tiny_model("moe", num_hidden_layers=2))
    assert "auxiliary_loss" not in built.train_batch(tiny_batch(LENGTHS), SFT())
    with pytest.raises(ValueError, match="output_router_logits"):
        build_plain_engine(config(), model())


def on_ranks(context_parallel: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    built = build_engine(config(max_tokens_per_rank=16, context_parallel=context_parallel), model())
    results = [built.train_batch(tiny_batch(lengths), SFT()) for lengths in (LENGTHS, [9], [14, 13, 3])]
    return results, weights(built)


@pytest.mark.parametrize("context_parallel", ["off", "static:2", "dynamic"])
def test_two_ranks_equal_one(context_parallel: str) -> None:
    want, one = on_ranks("off")
    torch.distributed.destroy_process_group()
    got, two = launch_forked(on_ranks, (context_parallel,), world_size=2)
    ensure_group("cpu")
    for left, right in zip(want, got, strict=True):
        for key in ("loss", "auxiliary_loss", "grad_norm"):
            assert right[key] == pytest.approx(left[key], rel=3e-5), key
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=2e-5, rtol=1e-4, msg=name)


def test_the_formula_against_transformers_function() -> None:
    """On random logits with padding, summed over parts of any size."""
    rng = torch.Generator().manual_seed(0)
    loss = RouterLoss(2.0, experts=5, top_k=2, layers=3)
    logits = [torch.randn(24, 5, generator=rng, dtype=torch.float64).float() for _ in range(3)]
    counted = torch.rand(24, generator=rng) > 0.3
    want = 2.0 * load_balancing_loss_func(tuple(logits), 5, 2, counted.view(4, 6).long())
    for bounds in ([0, 24], [0, 7, 24], [0, 1, 2, 13, 24]):
        parts = [loss.routing([layer[a:b] for layer in logits], counted[a:b]) for a, b in pairwise(bounds)]
        counts = RouterCounts(
            reduce(torch.add, [part.chosen for part in parts]), reduce(torch.add, [part.rows for part in parts])
        )
        got = sum(loss.loss(part.terms, counts) for part in parts)
        torch.testing.assert_close(got, want)

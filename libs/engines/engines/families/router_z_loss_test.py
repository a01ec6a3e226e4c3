"""The router's z-loss equals its formula on the whole batch, in any micro-batches and on any ranks."""

from typing import Any

import pytest
import torch

from engines import EngineConfig, TrainEngine, build_engine
from engines.families.family import routed_layers
from engines.families.registry import family_of
from engines.families.router import RouterCounts, RouterLoss
from engines.launch import ensure_group
from engines.parallel.groups import ParallelGroups
from engines.parallel.layout import ParallelLayout
from engines.parallel.planning import DataParallelPlanner
from engines.proofs.forked_ranks import launch_forked
from engines.proofs.plain_router import PlainRouterExecutor
from engines.step import Engine
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch, tiny_config, tiny_model
from engines.weights.model_weights import ModelWeights
from objectives import SFT

LENGTHS = [7, 3, 12, 5, 9, 2, 14, 6]
BOTH: dict[str, Any] = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.2}
ALONE = {"router_z_loss_coef": 0.2}


def model(kind: str = "moe") -> Any:
    return tiny_model(kind, scale=2.0, num_hidden_layers=2)


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"device": "cpu", "lr": 1e-2, "eps": 1e-2, "grad_clip": None, **options})


def weights(built: TrainEngine) -> dict[str, torch.Tensor]:
    return {part.name: part.flat.clone() for part in built.export_weights(max_bytes=2**40)}


def plain(kind: str = "moe", **options: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Two steps of stock transformers in float64, each router's logits of the whole batch in one formula."""
    made, settings = model(kind).double(), config(**options)
    made.config._experts_implementation = "eager"  # transformers' default has no float64
    groups = ParallelGroups.make(ParallelLayout())
    listed = ModelWeights.of(family_of(made.config), made)
    planner = DataParallelPlanner(settings.max_tokens_per_rank, 1)
    built = Engine(settings, PlainRouterExecutor(settings, groups, made), planner, listed)
    return [built.train_batch(tiny_batch(LENGTHS, seed=step), SFT()) for step in range(2)], weights(built)


def packed(kind: str = "moe", **options: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    built = build_engine(config(**options), model(kind))
    return [built.train_batch(tiny_batch(LENGTHS, seed=step), SFT()) for step in range(2)], weights(built)


def assert_same(
    got: tuple[list[dict[str, float]], dict[str, torch.Tensor]],
    want: tuple[list[dict[str, float]], dict[str, torch.Tensor]],
) -> None:
    for left, right in zip(got[0], want[0], strict=True):
        for key in ("loss", "auxiliary_loss", "grad_norm"):
            assert left[key] == pytest.approx(right[key], rel=3e-5), key
    for name, value in want[1].items():
        torch.testing.assert_close(got[1][name], value.float(), atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("kind", ["moe", "next"])
@pytest.mark.parametrize("losses", [ALONE, BOTH], ids=["alone", "both"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens_per_rank": 1000},
        {"max_tokens_per_rank": 15, "gradient_checkpointing": True},
        {"max_tokens_per_rank": 31, "batching": "padded"},
    ],
    ids=["one", "many, recomputed", "padded"],
)
def test_steps_equal_a_plain_loop(kind: str, losses: dict[str, Any], options: dict[str, Any]) -> None:
    want = plain(kind, **losses)
    assert want[0][0]["auxiliary_loss"] > 0.1
    assert_same(packed(kind, **losses, **options), want)


@pytest.mark.parametrize("context_parallel", ["off", "static:2", "dynamic"])
def test_two_ranks_equal_one(context_parallel: str) -> None:
    want = plain(**BOTH)
    torch.distributed.destroy_process_group()
    options = {"max_tokens_per_rank": 16, "context_parallel": context_parallel}
    got = launch_forked(two_ranks, (BOTH | options,), world_size=2, device="cpu")
    ensure_group("cpu")
    assert_same(got, want)


def two_ranks(options: dict[str, Any]) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    return packed(**options)


def test_it_is_a_mean_over_tokens_and_a_sum_over_layers() -> None:
    """As in megatron-core: a coefficient means the same whatever the number of layers and ranks."""
    loss = RouterLoss(0.0, experts=2, top_k=1, layers=3, z_coefficient=0.5)
    logits = [torch.full((4, 2), value, dtype=torch.float64) for value in (1.0, 2.0, 3.0)]
    counted = torch.tensor([True, True, False, True])
    sums = loss.routing(logits, counted)
    partition = [value + torch.log(torch.tensor(2.0, dtype=torch.float64)) for value in (1.0, 2.0, 3.0)]
    want = 0.5 * sum(value**2 for value in partition)
    torch.testing.assert_close(loss.loss(sums.terms, RouterCounts(sums.chosen, sums.rows)), want)


def test_layers_with_experts_are_counted_as_transformers_places_them() -> None:
    for changes in ({}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}):
        made = tiny_model("next", **changes)
        routers = [m for m in made.modules() if type(m).__name__.endswith("TopKRouter")]
        assert routed_layers(made.config) == len(routers)
    assert routed_layers(tiny_config("vision_moe").get_text_config()) == 4


def test_a_model_without_experts_and_a_negative_coefficient_are_refused() -> None:
    with pytest.raises(ValueError, match="router_z_loss_coef is for models with experts, qwen3_5_text has none"):
        build_engine(config(**ALONE), tiny_model("dense"))
    with pytest.raises(ValueError, match="router_z_loss_coef must be at least 0"):
        config(router_z_loss_coef=-0.1)

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import EngineConfig
from engines.mtp.head import add_head
from engines.parallel.stages import split_layers
from engines.tiny import tiny_model
from runplan.estimates.peak_memory import Tokens, fsdp_peak, megatron_peak
from runplan.estimates.states import States, fsdp_states, megatron_states, parameters_by_stage
from runplan.layout.grid import make_grid
from runplan.model.model_shape import (
    ModelShape,
    VisionTower,
    count_parameters,
    head_parameters,
    shape_of,
    tower_parameters,
)

SHAPE = ModelShape(
    "m",
    "",
    "",
    layers=8,
    hidden=64,
    heads=4,
    kv_heads=4,
    head_dim=16,
    vocab=128,
    experts=8,
    experts_per_token=2,
    expert_intermediate=32,
)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]))
def test_one_copy_of_every_parameter_is_held_by_the_ranks_together(tp: int, pp: int, ep: int) -> None:
    ranks = pp * tp * ep
    grid = make_grid(ranks, tp=tp, pp=pp, ep=ep)
    layers = [sum(stage) for stage in split_layers(SHAPE.layers, pp)]
    stages = parameters_by_stage(SHAPE, grid, layers)
    count = count_parameters(SHAPE)
    dense = sum(stage.dense for stage in stages) * tp
    experts = sum(stage.experts for stage in stages) * ep
    assert dense == pytest.approx(count.embeddings + count.dense)
    assert experts == pytest.approx(count.experts)


def test_adam_in_mixed_precision_takes_eighteen_bytes_a_parameter_on_one_rank() -> None:
    (held,) = parameters_by_stage(SHAPE, make_grid(1), [8])
    total = count_parameters(SHAPE).total

    def states(width: int, ranks: int = 1, **settings: Any) -> States:
        return megatron_states(EngineConfig(backend="megatron", **settings), make_grid(ranks), held, width)

    assert states(2).device == pytest.approx(18 * total)
    assert states(4).device == pytest.approx(16 * total)
    moved = states(2, optimizer_on_host=True)
    assert (moved.device, moved.host) == pytest.approx((6 * total, 12 * total))
    assert states(2, ranks=4).device == pytest.approx(18 * total), "each rank has all states, but for the option"
    assert states(2, ranks=4, distributed_optimizer=True).device == pytest.approx((6 + 12 / 4) * total)


def test_fsdp_shards_masters_gradients_and_two_moments() -> None:
    total = count_parameters(SHAPE).total
    assert fsdp_states(SHAPE, EngineConfig(), 4).device == 4 * total
    moved = fsdp_states(SHAPE, EngineConfig(optimizer_on_host=True), 4)
    assert (moved.device, moved.host) == (2 * total, 2 * total)
    assert fsdp_states(SHAPE, EngineConfig(master_dtype="bfloat16"), 1).device == 8 * total
    assert fsdp_states(SHAPE, EngineConfig(moments_dtype="bfloat16", betas=(0.9, 0.95)), 1).device == 12 * total


def test_a_tower_is_held_where_it_sees_and_has_gradients_where_it_is_trained() -> None:
    seeing = replace(SHAPE, vision=VisionTower(layers=2, hidden=16, intermediate=20, positions=9))
    tower, total = tower_parameters(seeing), count_parameters(SHAPE).total
    for config, each in (
        (EngineConfig(), 0),
        (EngineConfig(vision="frozen"), 4),
        (EngineConfig(vision="trained"), 16),
    ):
        assert fsdp_states(seeing, config, 1).device == 16 * total + each * tower
    grid = make_grid(2, pp=2)
    first, _ = parameters_by_stage(seeing, grid, [4, 4])
    engine = EngineConfig(backend="megatron", vision="frozen")
    more = megatron_states(engine, grid, first, 2, tower).device - megatron_states(engine, grid, first, 2).device
    assert more == pytest.approx(2 * tower)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_trained_head_for_multi_token_prediction_is_counted_as_it_is(kind: str) -> None:
    """By the head that an engine makes; on the last stage, where tensor parallelism splits all but its first matrix."""
    made: Any = tiny_model(kind, mtp_num_hidden_layers=1)
    add_head(made)
    shape, number = shape_of(made.config, "m"), sum(p.numel() for p in made.mtp.parameters())
    assert head_parameters(shape).total == number
    whole, total = 2 * shape.hidden**2, count_parameters(shape).total
    config = EngineConfig(mtp_loss_scaling_factor=0.1)
    assert fsdp_states(shape, config, 2).weights == pytest.approx(4 * (total + number) / 2)
    for tp in (1, 2):
        grid = make_grid(2 * tp, tp=tp, pp=2)
        plain, own = (parameters_by_stage(shape, grid, [2, 2], mtp) for mtp in (False, True))
        assert own[0] == plain[0]
        added = own[1].dense + own[1].experts - plain[1].dense - plain[1].experts
        experts = head_parameters(shape).experts
        assert added == pytest.approx(whole + (number - whole - experts) / tp + experts)


def test_the_heads_activations_and_copies_are_in_the_peak() -> None:
    tokens = Tokens(1000, 1000)
    for backend in ("fsdp2", "megatron"):
        config = EngineConfig(backend=backend)
        peaks = []
        for engine in (config, replace(config, mtp_loss_scaling_factor=0.1)):
            made = megatron_peak(SHAPE, engine, make_grid(1), [8], tokens, 2)
            peaks.append(made if backend == "megatron" else fsdp_peak(SHAPE, engine, 2, tokens, 2))
        assert peaks[1].moments["head"] - peaks[0].moments["head"] > 2 * 1000 * 7 * SHAPE.hidden

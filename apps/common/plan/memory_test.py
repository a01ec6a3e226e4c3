import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.common.plan.grid import make_grid
from apps.common.plan.memory import fsdp_bytes, held_by_stage, megatron_bytes
from apps.common.plan.model_shape import ModelShape, count_parameters
from engines.parallel.stages import split_layers

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
def test_one_copy_of_every_parameter_is_held_by_the_ranks_together(tp, pp, ep):
    ranks = pp * tp * ep
    grid = make_grid(ranks, tp=tp, pp=pp, ep=ep)
    layers = [sum(stage) for stage in split_layers(SHAPE.layers, pp)]
    held = held_by_stage(SHAPE, grid, layers)
    count = count_parameters(SHAPE)
    dense = sum(stage.dense for stage in held) * tp
    experts = sum(stage.experts for stage in held) * ep
    assert dense == pytest.approx(count.embeddings + count.dense)
    assert experts == pytest.approx(count.experts)


def test_adam_in_mixed_precision_takes_eighteen_bytes_a_parameter_on_one_rank():
    grid = make_grid(1)
    (held,) = held_by_stage(SHAPE, grid, [8])
    assert megatron_bytes(held, grid, optimizer_on_host=False) == pytest.approx(18 * count_parameters(SHAPE).total)
    assert megatron_bytes(held, grid, optimizer_on_host=True) == pytest.approx(6 * count_parameters(SHAPE).total)


def test_fsdp_shards_masters_gradients_and_two_moments():
    assert fsdp_bytes(SHAPE, 4, 4, optimizer_on_host=False) == 4 * count_parameters(SHAPE).total
    assert fsdp_bytes(SHAPE, 4, 4, optimizer_on_host=True) == 2 * count_parameters(SHAPE).total

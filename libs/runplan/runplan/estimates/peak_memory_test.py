"""The peak's arithmetic: what must hold for any sizes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import EngineConfig
from engines.tiny import tiny_config, tiny_model
from runplan.estimates.peak_memory import Peak, Tokens, fsdp_peak, megatron_peak
from runplan.layout.grid import make_grid
from runplan.model.model_shape import ModelShape, count_parameters, shape_of

SHAPE = ModelShape(
    "mixture", "", "", layers=8, hidden=64, heads=4, kv_heads=4, head_dim=16, vocab=128, experts=8,
    experts_per_token=2, expert_intermediate=32,
)  # fmt: skip
TOKENS = st.integers(1, 4096)
PLAIN = EngineConfig(device="cpu")
MEGATRON = EngineConfig(device="cpu", backend="megatron")


def engine(recompute: bool, **settings: Any) -> EngineConfig:
    return EngineConfig(device="cpu", gradient_checkpointing=recompute, **settings)


@pytest.mark.parametrize("kind", ["dense", "moe", "attention"])
def test_sizes_are_read_from_a_config(kind: str) -> None:
    """Every parameter of the module is counted."""
    shape = shape_of(tiny_config(kind), kind)
    assert count_parameters(shape).total == sum(p.numel() for p in tiny_model(kind).parameters())


def test_states_of_both_backends() -> None:
    """FSDP2: masters and two moments between steps. Megatron: weights, gradients, masters and two moments."""
    total, tokens = count_parameters(SHAPE).total, Tokens(1, 1)
    assert fsdp_peak(SHAPE, PLAIN, 4, tokens, 2).states == 12 * total / 4
    assert megatron_peak(SHAPE, MEGATRON, make_grid(1), [8], tokens, 2).states == pytest.approx(18 * total)
    assert megatron_peak(SHAPE, MEGATRON, make_grid(1), [8], tokens, 4).states == pytest.approx(16 * total)
    shared = engine(False, backend="megatron", distributed_optimizer=True)
    assert megatron_peak(SHAPE, shared, make_grid(4), [8], tokens, 2).states == pytest.approx((6 + 12 / 4) * total)


@given(TOKENS, TOKENS, st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_more_tokens_take_more_and_more_ranks_less(tokens: int, more: int, ranks: int, recompute: bool) -> None:
    few, many = Tokens(tokens, tokens), Tokens(tokens + more, tokens + more)
    settings = engine(recompute)
    peak = fsdp_peak(SHAPE, settings, ranks, few, 2)
    assert fsdp_peak(SHAPE, settings, ranks, many, 2).bytes >= peak.bytes
    assert fsdp_peak(SHAPE, settings, 2 * ranks, few, 2).bytes < peak.bytes
    assert peak.bytes >= 16 * count_parameters(SHAPE).total / ranks
    assert peak.moments[peak.when] == peak.bytes > peak.states


@given(TOKENS, st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]))
def test_recomputing_takes_less_and_tensor_parallelism_divides(tokens: int, pp: int, tp: int) -> None:
    def peak(recompute: bool, tp: int) -> Peak:
        grid = make_grid(tp * pp, tp=tp, pp=pp)
        return megatron_peak(SHAPE, engine(recompute, backend="megatron"), grid, [8 // pp] * pp, Tokens(tokens, 1), 2)

    assert peak(True, tp).bytes <= peak(False, tp).bytes
    assert peak(True, 2 * tp).bytes < peak(True, tp).bytes

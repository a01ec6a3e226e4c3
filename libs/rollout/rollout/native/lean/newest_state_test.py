"""States of newest tokens: advanced in place as by `seqpack.ops`, step by step."""

import pytest
import torch

from rollout.native.lean.newest_state import convolve_newest, recur_newest
from seqpack.ops import causal_conv1d_step, gated_delta_rule_step

BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.0}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(1, 4, 4, 8, 8), (5, 2, 6, 8, 4)])
def test_a_delta_net_goes_on_as_step_by_step(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    rows, key_heads, value_heads, key_dim, value_dim = shape
    torch.manual_seed(rows)
    state = torch.randn(rows, value_heads, key_dim, value_dim).to(torch.promote_types(dtype, torch.float32))
    expected = state.clone()
    for _ in range(4):
        q, k = torch.randn(2, rows, key_heads, key_dim).to(dtype).unbind()
        v = torch.randn(rows, value_heads, value_dim).to(dtype)
        g, beta = -torch.rand(rows, value_heads, dtype=state.dtype), torch.rand(rows, value_heads).to(dtype)
        wanted, expected = gated_delta_rule_step(q, k, v, g, beta, expected)
        before = state.data_ptr()
        got = recur_newest(q, k, v, g, beta, state)
        torch.testing.assert_close(got, wanted, rtol=0, atol=BOUNDS[dtype])
        torch.testing.assert_close(state, expected, rtol=0, atol=BOUNDS[dtype])
        assert state.data_ptr() == before


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_a_convolution_goes_on_as_step_by_step(taps: int, dtype: torch.dtype) -> None:
    torch.manual_seed(taps)
    past, weight = torch.randn(3, taps - 1, 10).to(dtype), torch.randn(10, taps).to(dtype)
    expected = past.clone()
    for _ in range(5):
        x = torch.randn(3, 10).to(dtype)
        wanted, after = causal_conv1d_step(x, expected.transpose(1, 2), weight, None, "silu")
        expected = after.transpose(1, 2)
        torch.testing.assert_close(convolve_newest(x, past, weight), wanted, rtol=0, atol=BOUNDS[dtype])
        assert past.equal(expected)

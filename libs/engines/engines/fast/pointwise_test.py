"""Each piece against transformers' formula, and its written gradient against autograd's, in float64."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5 import modeling_qwen3_5 as stock

from engines.fast import pointwise
from seqpack.ops import causal_conv1d

EPS = 1e-6


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_autograd(
    function: Callable[..., Any], operands: Sequence[torch.Tensor], grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in operands]
    return torch.autograd.grad((function(*leaves) * grad).sum(), leaves)


def check(
    function: Callable[..., Any], gradient: Callable[..., Any], operands: Sequence[torch.Tensor], shape: tuple[int, ...]
) -> None:
    grad = randn(*shape, seed=9)
    grads = gradient(*operands, grad)
    grads = grads if isinstance(grads, tuple) else (grads,)
    for mine, autograd in zip(grads, by_autograd(function, operands, grad), strict=True):
        torch.testing.assert_close(mine, autograd, rtol=1e-10, atol=1e-10)


@given(st.integers(1, 5), st.integers(1, 9))
@settings(max_examples=20, deadline=None)
def test_norms(tokens: int, width: int) -> None:
    x, z, w = randn(tokens, 3, width), randn(tokens, 3, width, seed=1), randn(width, seed=2)
    norm, gated = stock.Qwen3_5RMSNorm(width, EPS).double(), stock.Qwen3_5RMSNormGated(width, EPS).double()
    norm.weight.data, gated.weight.data = w, w
    torch.testing.assert_close(pointwise.gated_norm(x, z, w, EPS), gated(x, z).detach(), rtol=1e-5, atol=1e-6)
    plain = Qwen3RMSNorm(width, EPS).double()
    plain.weight.data = w
    for module, kind in ((norm, pointwise.Norm(EPS)), (plain, pointwise.Norm(EPS, zero_centered=False))):
        torch.testing.assert_close(pointwise.rms_norm(x, w, kind), module(x).detach(), rtol=1e-5, atol=1e-6)
        check(
            partial(pointwise.rms_norm, norm=kind),
            lambda a, b, g, kind=kind: pointwise.rms_norm_grad(a, b, kind, g),
            (x, w),
            x.shape,
        )
    check(
        lambda a, b, c: pointwise.gated_norm(a, b, c, EPS),
        lambda a, b, c, g: pointwise.gated_norm_grad(a, b, c, EPS, g),
        (x, z, w),
        x.shape,
    )


def test_swiglu_unit_and_decay() -> None:
    p, u = randn(7, 5), randn(7, 5, seed=1)
    torch.testing.assert_close(pointwise.swiglu(p, u), functional.silu(p) * u)
    check(pointwise.swiglu, pointwise.swiglu_grad, (p, u), p.shape)
    x = randn(7, 2, 8)
    torch.testing.assert_close(pointwise.l2_normalize(x), stock.l2norm(x))
    check(pointwise.l2_normalize, pointwise.l2_normalize_grad, (x,), x.shape)
    a, a_log, bias = randn(7, 4), randn(4, seed=1), randn(4, seed=2)
    torch.testing.assert_close(pointwise.decay(a, a_log, bias), -a_log.exp() * functional.softplus(a + bias))
    check(pointwise.decay, pointwise.decay_grad, (a, a_log, bias), a.shape)


@pytest.mark.parametrize("rotated", [8, 4, 2])
def test_rotation(rotated: int) -> None:
    x, angles = randn(6, 3, 8), randn(6, rotated // 2, seed=3)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    expected, _ = stock.apply_rotary_pos_emb(x, x, cos, sin)
    torch.testing.assert_close(pointwise.rotate(x, cos, sin), expected)
    (autograd,) = by_autograd(lambda q: pointwise.rotate(q, cos, sin), (x,), randn(*x.shape, seed=9))
    torch.testing.assert_close(pointwise.rotate_grad(randn(*x.shape, seed=9), cos, sin), autograd)


def test_rotation_back_uses_the_partners_sine() -> None:
    """Halves of cos and sin need not be equal for the gradient to be right (multi-axis positions make them so)."""
    x, cos, sin = randn(6, 3, 8), randn(6, 8, seed=1), randn(6, 8, seed=2)
    (autograd,) = by_autograd(lambda q: pointwise.rotate(q, cos, sin), (x,), randn(*x.shape, seed=9))
    torch.testing.assert_close(pointwise.rotate_grad(randn(*x.shape, seed=9), cos, sin), autograd)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_convolution_stays_in_its_sequence(lengths: list[int], taps: int) -> None:
    tokens = sum(lengths)
    x, w = randn(tokens, 3), randn(3, taps, seed=1)
    position = torch.cat([torch.arange(n) for n in lengths])
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    expected = causal_conv1d(x, w, None, cu_seqlens, activation="silu", backend="naive")
    torch.testing.assert_close(pointwise.conv_silu(x, w, position), expected)
    check(
        lambda a, b: pointwise.conv_silu(a, b, position),
        lambda a, b, g: pointwise.conv_silu_grad(a, b, position, g),
        (x, w),
        x.shape,
    )


def test_float32_inside_and_the_operands_dtype_outside() -> None:
    x, w = randn(5, 64, dtype=torch.float32), randn(64, seed=1, dtype=torch.float32)
    exact = pointwise.rms_norm(x.bfloat16().double(), w.bfloat16().double(), pointwise.Norm(EPS))
    rounded = pointwise.rms_norm(x.bfloat16(), w.bfloat16(), pointwise.Norm(EPS))
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded, exact.bfloat16())

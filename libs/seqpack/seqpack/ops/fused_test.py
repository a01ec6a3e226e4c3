"""What the kernels of other packages are handed, seen by stand-ins that compute it in plain torch on a CPU."""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from seqpack.ops import fused
from seqpack.ops.conv import causal_conv1d_torch
from seqpack.ops.delta_rule import gated_delta_rule_step_torch, gated_delta_rule_torch
from seqpack.ops.op_arguments import AttentionCall, ConvCall, DeltaCall, DeltaStep
from seqpack.ops.varlen_attention import attention_torch

StandIn = Callable[..., None]

CU = torch.tensor([0, 5, 6, 18], dtype=torch.int32)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Install a module that holds the given functions under a name that is not installed here."""

    def install(name: str, **functions: Callable[..., Any]) -> None:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            module = ModuleType(path)
            monkeypatch.setitem(sys.modules, path, module)
        for key, function in functions.items():
            setattr(module, key, function)

    return install


def delta_call(state: bool = True) -> DeltaCall:
    torch.manual_seed(0)
    q, k, v = (torch.randn(18, h, 4) for h in (2, 2, 4))
    initial = torch.randn(3, 4, 4, 4) if state else None
    return DeltaCall(q, k, v, -torch.rand(18, 4), torch.rand(18, 4), CU, 0.3, True, initial, state, None)


KEEPS_NO_STATES = {"enable_fwd_cp_cache": False}


def chunk_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: torch.Tensor,
    **options: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    assert options in ({}, KEEPS_NO_STATES)
    assert {x.shape[0] for x in (q, k, v, g, beta)} == {1}
    assert all(x.is_contiguous() for x in (q, k, v, g, beta))
    assert g.dtype == torch.float32
    assert cu_seqlens.dtype == torch.int64
    operands = q[0], k[0], v[0], g[0], beta[0]
    call = DeltaCall(*operands, cu_seqlens, scale, use_qk_l2norm_in_kernel, initial_state, output_final_state, None)
    o, final = gated_delta_rule_torch(call)
    return o[None], final


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("package", ["fla.ops.gated_delta_rule", "flash_qla"])
def test_the_chunked_kernels_get_one_packed_row(stand_in: StandIn, package: str, state: bool) -> None:
    stand_in(package, chunk_gated_delta_rule=chunk_kernel)
    run = fused.gated_delta_rule_fla if package.startswith("fla.") else fused.gated_delta_rule_flash_qla
    call = delta_call(state)
    for got, expected in zip(run(call), gated_delta_rule_torch(call), strict=True):
        if got is None or expected is None:
            assert got is expected
        else:
            assert torch.equal(got, expected)


def test_flash_qla_is_asked_to_keep_no_states(stand_in: StandIn) -> None:
    """A recomputed layer would hold them (`gpu_test.py` counts the bytes)."""
    asked: list[dict[str, Any]] = []

    def kernel(*operands: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        asked.append({name: options[name] for name in KEEPS_NO_STATES if name in options})
        return chunk_kernel(*operands, **options)

    stand_in("flash_qla", chunk_gated_delta_rule=kernel)
    fused.gated_delta_rule_flash_qla(delta_call())
    assert asked == [KEEPS_NO_STATES]


@pytest.mark.parametrize("state", [True, False])
def test_the_chunked_kernels_get_no_empty_sequence(stand_in: StandIn, state: bool) -> None:
    def kernel(*operands: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert bool((options["cu_seqlens"].diff() > 0).all())
        return chunk_kernel(*operands, **options)

    stand_in("flash_qla", chunk_gated_delta_rule=kernel)
    call = replace(delta_call(), cu_seqlens=torch.tensor([0, 0, 11, 18], dtype=torch.int32))
    call = replace(call, initial_state=call.initial_state if state else None)
    for _ in range(2):  # the second time from what is remembered
        for got, expected in zip(fused.gated_delta_rule_flash_qla(call), gated_delta_rule_torch(call), strict=True):
            torch.testing.assert_close(got, expected)


def test_boundaries_written_anew_are_looked_at_anew(stand_in: StandIn) -> None:
    stand_in("flash_qla", chunk_gated_delta_rule=chunk_kernel)
    call = delta_call()
    call = replace(call, cu_seqlens=call.cu_seqlens.clone())
    fused.gated_delta_rule_flash_qla(call)
    call.cu_seqlens[1] += 1
    for got, expected in zip(fused.gated_delta_rule_flash_qla(call), gated_delta_rule_torch(call), strict=True):
        torch.testing.assert_close(got, expected)


def test_the_recurrent_kernel_gets_one_token_a_sequence(stand_in: StandIn) -> None:
    def kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float,
        initial_state: torch.Tensor,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert output_final_state
        assert {x.shape[1] for x in (q, k, v, g, beta)} == {1}
        operands = q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0]
        o, after = gated_delta_rule_step_torch(DeltaStep(*operands, initial_state, scale, use_qk_l2norm_in_kernel))
        return o[:, None], after

    stand_in("fla.ops.gated_delta_rule", fused_recurrent_gated_delta_rule=kernel)
    call = delta_call()
    operands = call.q[:3], call.k[:3], call.v[:3], call.g[:3], call.beta[:3]
    assert call.initial_state is not None
    step = DeltaStep(*operands, call.initial_state, 0.3, False)
    for got, expected in zip(fused.gated_delta_rule_step_fla(step), gated_delta_rule_step_torch(step), strict=True):
        assert torch.equal(got, expected)


def conv_call(state: bool) -> ConvCall:
    torch.manual_seed(0)
    initial = torch.randn(3, 8, 3) if state else None
    return ConvCall(torch.randn(18, 8), torch.randn(8, 4), torch.randn(8), CU, "silu", initial)


def test_the_convolution_package_gets_sequence_numbers(stand_in: StandIn) -> None:
    def kernel(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, seq_idx: torch.Tensor, activation: str | None
    ) -> torch.Tensor:
        assert x.shape == (1, 8, 18)
        assert x.stride(1) == 1
        assert seq_idx.dtype == torch.int32
        assert seq_idx.tolist() == [[0] * 5 + [1] + [2] * 12]
        return causal_conv1d_torch(ConvCall(x[0].t(), weight, bias, CU, activation, None)).t()[None]

    stand_in("causal_conv1d", causal_conv1d_fn=kernel)
    assert torch.equal(fused.causal_conv1d_package(conv_call(False)), causal_conv1d_torch(conv_call(False)))


@pytest.mark.parametrize("tokens", [1, 2, 18])
def test_the_convolution_packages_gradient_has_channels_last(stand_in: StandIn, tokens: int) -> None:
    """Its backward pass refuses others, and strides that are no multiple of 8."""

    def check(grad: torch.Tensor) -> None:
        assert grad.stride()[1:] == (1, 8)
        assert grad.stride(0) % 8 == 0

    def kernel(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, seq_idx: torch.Tensor, activation: str | None
    ) -> torch.Tensor:
        cu_seqlens = torch.tensor([0, *seq_idx[0].unique_consecutive(return_counts=True)[1].cumsum(0).tolist()])
        y = causal_conv1d_torch(ConvCall(x[0].t(), weight, bias, cu_seqlens.int(), activation, None))[None]
        y = y.transpose(1, 2)
        y.register_hook(check)
        return y

    stand_in("causal_conv1d", causal_conv1d_fn=kernel)
    call = replace(conv_call(False), x=torch.randn(tokens, 8), cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32))
    call.weight.requires_grad_()
    got = fused.causal_conv1d_package(call)
    torch.testing.assert_close(got, causal_conv1d_torch(call))
    torch.cat(got.split([2, 2, 4], dim=1), dim=1).square().sum().backward()
    assert call.weight.grad is not None


@pytest.mark.parametrize("state", [True, False])
def test_the_convolution_of_fla_gets_a_state_of_all_taps(stand_in: StandIn, state: bool) -> None:
    def kernel(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        initial_state: torch.Tensor | None,
        activation: str | None,
        cu_seqlens: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        if initial_state is not None:
            assert initial_state.shape == (3, 8, 4)
            assert not initial_state[..., 0].any()
            initial_state = initial_state[..., 1:]
        return causal_conv1d_torch(ConvCall(x[0], weight, bias, cu_seqlens, activation, initial_state))[None], None

    stand_in("fla.modules.causal_conv1d", causal_conv1d=kernel)
    assert torch.equal(fused.causal_conv1d_fla(conv_call(state)), causal_conv1d_torch(conv_call(state)))


def attention_call(**options: Any) -> AttentionCall:
    torch.manual_seed(0)
    q, k, v = (torch.randn(18, h, 8) for h in (4, 2, 2))
    return AttentionCall(**{"q": q, "k": k, "v": v, "cu_seqlens": CU, "scale": 0.2, "causal": True, "window": None,
                            "max_seqlen": None, **options})  # fmt: skip


def with_windows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    assert enable_gqa
    assert scale is not None
    assert (max_q, max_k) == (12, 12)
    left, right = window_size
    window = None if left == -1 else left + 1
    return attention_torch(AttentionCall(query, key, value, cu_q, scale, right == 0, window, max_q))


def without_windows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
) -> torch.Tensor:
    return attention_torch(AttentionCall(query, key, value, cu_q, query.shape[2] ** -0.5, is_causal, None, max_q))


@pytest.mark.parametrize("kernel", [with_windows, without_windows])
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 3}, {"max_seqlen": 12}])
def test_both_forms_of_varlen_attention_are_served(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., torch.Tensor], options: dict[str, Any]
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    call = attention_call(**options)
    if kernel is without_windows and "window" in options:
        with pytest.raises(ValueError, match="has no sliding window; use backend='torch'"):
            fused.attention_varlen(call)
    else:
        torch.testing.assert_close(fused.attention_varlen(call), attention_torch(call))

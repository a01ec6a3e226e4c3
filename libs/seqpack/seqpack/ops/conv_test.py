from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqpack.ops import conv
from seqpack.ops.conv import Activation, causal_conv1d, causal_conv1d_state, causal_conv1d_step
from seqpack.ops.scatter_gather import row_blocks

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(lambda x: sum(x) > 0)


@pytest.fixture(params=[1 << 18, 1], ids=["one block", "blocks of 16 rows"], autouse=True, scope="module")
def blocks(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv, "row_blocks", partial(row_blocks, numbers=request.param))
        yield


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def inputs(
    lengths: list[int], dim: int = 3, kernel: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(lengths), dim), (dim, kernel), (dim,), (len(lengths), dim, kernel - 1)]
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.sampled_from([None, "silu"]), st.booleans(), st.booleans())
def test_torch_path_equals_the_oracle(
    lengths: list[int], kernel: int, activation: Activation, with_bias: bool, with_state: bool
) -> None:
    x, weight, bias, state = inputs(lengths, kernel=kernel)
    given_tensors = [x, weight, *([bias] if with_bias else []), *([state] if with_state and kernel > 1 else [])]
    results = []
    for backend in ("naive", "torch"):
        y = causal_conv1d(
            x,
            weight,
            bias if with_bias else None,
            cumulative(lengths),
            activation,
            state if with_state else None,
            backend,
        )
        w = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).cos()
        grads = torch.autograd.grad((y * w).sum(), given_tensors, allow_unused=True)
        results.append(
            [y, *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, given_tensors, strict=True))]
        )
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    x, weight, bias, state = inputs([3, 1, 5], dim=2)
    cu = cumulative([3, 1, 5])
    assert torch.autograd.gradcheck(
        lambda x, w, b, s: causal_conv1d(x, w, b, cu, "silu", s, backend="torch"), (x, weight, bias, state)
    )


def test_matches_the_depthwise_convolution_of_torch() -> None:
    conv = torch.nn.Conv1d(5, 5, 4, groups=5, padding=3)
    x = torch.randn(11, 5)
    expected = conv(x.t()[None])[0, :, :11].t()
    y = causal_conv1d(x, conv.weight.squeeze(1), conv.bias, torch.tensor([0, 11], dtype=torch.int32))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_nothing_crosses_a_boundary_not_even_nan() -> None:
    x, weight, bias, _ = inputs([4, 3, 6])
    cu = cumulative([4, 3, 6])
    with torch.no_grad():
        before = causal_conv1d(x, weight, bias, cu, "silu")
        x[4:7] = float("nan")
        after = causal_conv1d(x, weight, bias, cu, "silu")
    assert torch.equal(before[:4], after[:4])
    assert torch.equal(before[7:], after[7:])


def test_steps_continue_a_prefix() -> None:
    lengths, extra = [5, 1, 2], 3
    x, weight, bias, _ = inputs([n + extra for n in lengths])
    full = causal_conv1d(x, weight, bias, cumulative([n + extra for n in lengths]), "silu")
    pieces = x.split([n + extra for n in lengths])
    prefix = torch.cat([p[:n] for p, n in zip(pieces, lengths, strict=True)])
    state = causal_conv1d_state(prefix, cumulative(lengths), 4)
    for step in range(extra):
        new = torch.stack([p[n + step] for p, n in zip(pieces, lengths, strict=True)])
        y, state = causal_conv1d_step(new, state, weight, bias, "silu")
        ends = [sum(lengths[: i + 1]) + i * extra + step for i in range(3)]
        torch.testing.assert_close(y, full[ends], rtol=1e-12, atol=1e-12)


def test_state_of_a_prefix_continues_the_packed_call_too() -> None:
    x, weight, bias, _ = inputs([7, 6])
    whole = causal_conv1d(x, weight, bias, cumulative([7, 6]))
    state = causal_conv1d_state(torch.cat([x[:2], x[7:11]]), cumulative([2, 4]), 4)
    rest = causal_conv1d(torch.cat([x[2:7], x[11:]]), weight, bias, cumulative([5, 2]), None, state)
    torch.testing.assert_close(rest, torch.cat([whole[2:7], whole[11:]]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("edges", [[0], [0, 0], [0, 0, 0]])
def test_no_tokens_at_all(edges: list[int]) -> None:
    cu = torch.tensor(edges, dtype=torch.int32)
    assert causal_conv1d(torch.randn(0, 3), torch.randn(3, 4), None, cu, "silu").shape == (0, 3)
    assert causal_conv1d_state(torch.randn(0, 3), cu, 4).shape == (len(edges) - 1, 3, 3)


def test_half_precision_is_summed_in_float32() -> None:
    x, weight, bias, _ = inputs([40, 2, 70], dtype=torch.float32)
    y = causal_conv1d(x.bfloat16(), weight, bias, cumulative([40, 2, 70]), "silu")
    exact = causal_conv1d(x.bfloat16().double(), weight.double(), bias.double(), cumulative([40, 2, 70]), "silu")
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cu_seqlens": torch.tensor([0, 4], dtype=torch.int32)}, "ends at 4, but there are 5"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 5])}, "decreases at entry 2: 4 -> 3"),
        ({"cu_seqlens": torch.tensor([1, 5])}, "must start at 0, got 1"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "int32 or int64"),
        ({"weight": torch.randn(4, 4)}, "weight"),
        ({"bias": torch.randn(4)}, "bias"),
        ({"activation": "relu"}, "activation must be"),
        ({"initial_state": torch.randn(2, 3, 3)}, "initial_state must be"),
        ({"backend": "cuda"}, "no backend 'cuda'; choose from auto, "),
        ({"backend": "fla"}, "cannot run with backend 'fla': "),
        ({"backend": "causal_conv1d"}, "cannot run with backend 'causal_conv1d': "),
    ],
)
def test_bad_calls_are_named(change: dict[str, Any], text: str) -> None:
    call = {"x": torch.randn(5, 3), "weight": torch.randn(3, 4), "bias": None, "cu_seqlens": cumulative([5])}
    with pytest.raises(ValueError, match=text):
        causal_conv1d(**{**call, **change})

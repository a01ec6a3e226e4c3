from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqpack.ops.delta_rule import gated_delta_rule, gated_delta_rule_step
from seqpack.ops.delta_rule_chunks import choose_chunk_size, plan_chunks

# The tests hand over lists of tensors, whose number a type checker cannot know.
delta_rule: Callable[..., tuple[torch.Tensor, Any]] = gated_delta_rule
delta_step: Callable[..., tuple[torch.Tensor, torch.Tensor]] = gated_delta_rule_step

LENGTHS = st.lists(st.one_of(st.just(1), st.integers(0, 24)), min_size=1, max_size=5).filter(lambda x: sum(x) > 0)


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def inputs(
    lengths: list[int],
    key_heads: int = 1,
    groups: int = 1,
    dims: tuple[int, int] = (3, 2),
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    decay: float = 1.0,
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    total, heads = sum(lengths), key_heads * groups

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    q, k = random(total, key_heads, dims[0]), random(total, key_heads, dims[0])
    g, beta = -decay * random(total, heads).exp(), random(total, heads).sigmoid()
    tensors = q, k, random(total, heads, dims[1]), g, beta, random(len(lengths), heads, *dims)
    return [t.requires_grad_() for t in tensors]


def run(
    tensors: list[torch.Tensor], lengths: list[int], with_state: bool, backend: str, **options: Any
) -> tuple[torch.Tensor, ...]:
    *operands, state = tensors
    o, final = delta_rule(
        *operands,
        cumulative(lengths),
        initial_state=state if with_state else None,
        output_final_state=True,
        backend=backend,
        **options,
    )
    weights = [torch.arange(t.numel(), dtype=t.dtype).reshape(t.shape).cos() for t in (o, final)]
    loss = (o * weights[0]).sum() + (final * weights[1]).sum()
    grads = torch.autograd.grad(loss, operands + ([state] if with_state else []))
    return o, final, *grads


@settings(max_examples=40, deadline=None)
@given(
    LENGTHS, st.sampled_from([None, 1, 2, 5, 16]), st.booleans(), st.integers(1, 2), st.integers(1, 2), st.booleans()
)
def test_chunks_equal_the_recurrence_forward_and_backward(
    lengths: list[int], size: int | None, with_state: bool, key_heads: int, groups: int, norm: bool
) -> None:
    tensors = inputs(lengths, key_heads, groups, decay=0.1)
    options = {"l2norm_qk": norm} if norm else {"l2norm_qk": False, "scale": 0.1}
    expected = run(tensors, lengths, with_state, "naive", **options)
    got = run(tensors, lengths, with_state, "torch", chunk_size=size, **options)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["naive", "torch"])
def test_the_first_two_tokens_by_hand(backend: str) -> None:
    # With S = 0: S_1 = beta_1 k_1 v_1; S_2 = a S_1 + beta_2 k_2 (v_2 - k_2 a S_1), a = exp(g_2); o = S^T q / sqrt(Dk).
    q, k, v, g, beta, _ = inputs([2], dims=(3, 2))
    o, final = delta_rule(q, k, v, g, beta, cumulative([2]), output_final_state=True, backend=backend)
    unit_q, unit_k = (t[:, 0] / (t[:, 0] ** 2).sum(-1, keepdim=True).sqrt() for t in (q, k))
    first = beta[0] * torch.outer(unit_k[0], v[0, 0])
    old = g[1].exp() * first
    second = old + beta[1] * torch.outer(unit_k[1], v[1, 0] - unit_k[1] @ old)
    expected = torch.stack([unit_q[0] @ first, unit_q[1] @ second]) / 3**0.5
    torch.testing.assert_close(o[:, 0], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(final[0, 0], second, rtol=1e-4, atol=1e-5)


def test_a_step_scales_as_the_row_does() -> None:
    q, k, v, g, beta, _ = (t.detach() for t in inputs([1], key_heads=2, groups=2, dims=(5, 2)))
    o, final = delta_rule(q, k, v, g, beta, cumulative([1]), output_final_state=True)
    stepped, state = delta_step(q, k, v, g, beta, torch.zeros(1, 4, 5, 2, dtype=torch.float64))
    torch.testing.assert_close(stepped, o)
    torch.testing.assert_close(state, final)


@pytest.mark.parametrize("with_final", [False, True])
def test_gradcheck(with_final: bool) -> None:
    lengths = [5, 1, 3]
    *operands, state = inputs(lengths, 1, 2, decay=0.1)
    cu = cumulative(lengths)

    def call(*a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        o, final = delta_rule(
            *a[:5], cu, initial_state=a[5], output_final_state=with_final, chunk_size=2, backend="torch"
        )
        return (o, final) if with_final else o

    assert torch.autograd.gradcheck(call, (*operands, state))


def test_without_any_state_the_short_path_is_the_same() -> None:
    lengths = [7, 1, 12, 3]
    *operands, _ = inputs(lengths, 2, 2)
    cu = cumulative(lengths)
    expected, none = delta_rule(*operands, cu, backend="naive")
    assert none is None
    for size in (None, 4, 12, 64):
        got, none = delta_rule(*operands, cu, chunk_size=size, backend="torch")
        assert none is None
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_float32_stays_close_over_long_sequences_with_strong_and_weak_decay() -> None:
    lengths = [300, 1, 517, 64, 65]
    for decay in (1e-4, 0.05, 5.0):
        *exact, _ = inputs(lengths, 2, 2, (16, 16), decay=decay)
        cu = cumulative(lengths)
        reference, _ = delta_rule(*exact, cu, backend="torch", chunk_size=8)
        naive, _ = delta_rule(*exact, cu, backend="naive")
        torch.testing.assert_close(reference, naive, rtol=1e-9, atol=1e-9)
        got, _ = delta_rule(*(t.detach().float() for t in exact), cu)
        assert ((got - naive).norm() / naive.norm()).item() < 2e-6


def test_a_state_handed_on_equals_one_call() -> None:
    lengths = [13, 2, 30]
    *operands, state = inputs(lengths, 1, 2)
    whole, final = delta_rule(*operands, cumulative(lengths), initial_state=state, output_final_state=True)
    cuts = [5, 0, 30]
    first, second = [], []
    for length, cut, tokens in zip(lengths, cuts, torch.arange(sum(lengths)).split(lengths), strict=True):
        first.append(tokens[:cut])
        second.append(tokens[cut:])
        assert len(tokens) == length
    head, tail = torch.cat(first), torch.cat(second)
    o1, middle = delta_rule(
        *(t[head] for t in operands), cumulative(cuts), initial_state=state, output_final_state=True
    )
    left = [n - c for n, c in zip(lengths, cuts, strict=True)]
    o2, last = delta_rule(*(t[tail] for t in operands), cumulative(left), initial_state=middle, output_final_state=True)
    torch.testing.assert_close(torch.cat([o1, o2]), whole[torch.cat([head, tail])], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(last, final, rtol=1e-9, atol=1e-9)


def test_steps_equal_the_packed_call() -> None:
    lengths = [6, 6, 6]
    *operands, state = inputs(lengths, 2, 2)
    whole, final = delta_rule(*operands, cumulative(lengths), initial_state=state, output_final_state=True)
    for t in range(6):
        o, state = delta_step(*(x[t::6] for x in operands), state)
        torch.testing.assert_close(o, whole[t::6], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state, final, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kind", "width"), [(torch.float64, torch.float64), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("l2norm", [True, False])
def test_a_step_in_place_is_the_step(kind: torch.dtype, width: torch.dtype, l2norm: bool) -> None:
    *operands, state = (x.detach().to(kind) for x in inputs([1, 1, 1], 2, 2))
    state = state.to(width)
    o, after = delta_step(*operands, state, l2norm_qk=l2norm)
    own = state.clone()
    again, returned = delta_step(*operands, own, l2norm_qk=l2norm, inplace=True)
    assert returned.data_ptr() == own.data_ptr()
    assert torch.equal(own, after)
    assert torch.equal(o, again)
    assert after.dtype == width


def test_a_step_in_place_is_refused_where_a_gradient_flows() -> None:
    *operands, state = inputs([1, 1, 1], 2, 2)
    with pytest.raises(ValueError, match="no_grad"):
        delta_step(*operands, state.detach(), inplace=True)


def test_nothing_crosses_a_boundary_not_even_nan() -> None:
    lengths = [20, 3, 33]
    *operands, _ = inputs(lengths, dtype=torch.float32)
    with torch.no_grad():
        before, _ = delta_rule(*operands, cumulative(lengths), chunk_size=16)
        for t in operands:
            t[20:23] = float("nan")
        after, _ = delta_rule(*operands, cumulative(lengths), chunk_size=16)
    assert torch.equal(before[:20], after[:20])
    assert torch.equal(before[23:], after[23:])


@pytest.mark.parametrize("edges", [[0], [0, 0, 0]])
def test_no_tokens_at_all(edges: list[int]) -> None:
    q, g, state = torch.randn(0, 2, 4), torch.randn(0, 2), torch.randn(len(edges) - 1, 2, 4, 4)
    o, final = delta_rule(q, q, q, g, g, torch.tensor(edges), initial_state=state, output_final_state=True)
    assert o.shape == (0, 2, 4)
    assert torch.equal(final, state)


def test_half_precision_is_computed_in_float32() -> None:
    lengths = [40, 2, 70]
    *operands, _ = inputs(lengths, 1, 2, (16, 16), dtype=torch.float32)
    half = [t.detach().bfloat16() for t in operands]
    o, final = delta_rule(*half, cumulative(lengths), output_final_state=True)
    exact, _ = delta_rule(*(t.double() for t in half), cumulative(lengths))
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast, _ = delta_rule(*half, cumulative(lengths))
    assert torch.equal(under_autocast, o)
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(o.double(), exact, rtol=2**-8, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=30), st.integers(1, 70))
def test_plan_gives_each_token_a_place_of_its_own_in_order(lengths: list[int], size: int) -> None:
    plan = plan_chunks(lengths, size, torch.device("cpu"))
    assert list(plan.steps) == [n for s in range(200) if (n := sum(-(-x // size) > s for x in lengths))]
    places = (plan.rows * size + plan.columns).tolist()
    assert len(set(places)) == sum(lengths)
    rank = {sequence: i for i, sequence in enumerate(plan.order.tolist())}
    expected = [
        (sum(plan.steps[: t // size]) + rank[i]) * size + t % size
        for i, length in enumerate(lengths)
        for t in range(length)
    ]
    assert places == expected


def test_chunk_size_fits_the_lengths() -> None:
    assert choose_chunk_size([15] * 500, 4, 16, 16) == 15
    assert choose_chunk_size([1, 1], 4, 16, 16) == 1
    assert choose_chunk_size([0], 4, 16, 16) == 1
    assert choose_chunk_size([900], 4, 16, 16, "cuda") == 64
    assert choose_chunk_size([8192] * 4, 32, 128, 128) in (32, 48, 64)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": torch.randn(5, 2, 3)}, "q and k"),
        ({"v": torch.randn(5, 3, 4)}, "3 value heads are no multiple of the 2 key heads"),
        ({"g": torch.randn(5, 2)}, "g must be"),
        ({"cu_seqlens": cumulative([4])}, "ends at 4, but there are 5"),
        ({"initial_state": torch.randn(2, 4, 4, 4)}, "initial_state must be"),
        ({"chunk_size": 0}, "chunk_size must be positive"),
        ({"backend": "fla"}, "cannot run with backend 'fla': "),
        ({"backend": "flash_qla"}, "cannot run with backend 'flash_qla': "),
        ({"backend": "triton"}, "no backend 'triton'; choose from auto, "),
    ],
)
def test_bad_calls_are_named(change: dict[str, Any], text: str) -> None:
    call = {"q": torch.randn(5, 2, 4), "k": torch.randn(5, 2, 4), "v": torch.randn(5, 4, 4), "g": -torch.rand(5, 4)}
    call |= {"beta": torch.rand(5, 4), "cu_seqlens": cumulative([5])}
    with pytest.raises(ValueError, match=text):
        delta_rule(**{**call, **change})

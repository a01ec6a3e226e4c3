from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqpack.ops.varlen_attention import attention, buckets

# The tests hand over lists of tensors, whose number a type checker cannot know.
packed_attention: Callable[..., torch.Tensor] = attention

LENGTHS = st.lists(st.one_of(st.just(1), st.integers(0, 50)), min_size=1, max_size=5).filter(lambda x: 0 < sum(x) < 90)


def cumulative(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def inputs(
    lengths: list[int], heads: int = 1, groups: int = 1, dim: int = 4, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    counts = (heads * groups, heads, heads)
    return [torch.randn(sum(lengths), h, dim, generator=generator, dtype=dtype).requires_grad_() for h in counts]


def run(tensors: list[torch.Tensor], lengths: list[int], **options: Any) -> tuple[torch.Tensor, ...]:
    o = packed_attention(*tensors, cumulative(lengths), **options)
    return o, *torch.autograd.grad((o * torch.arange(o.numel(), dtype=o.dtype).reshape(o.shape).cos()).sum(), tensors)


@settings(max_examples=30, deadline=None)
@given(
    LENGTHS, st.integers(1, 2), st.integers(1, 2), st.sampled_from([(True, None), (True, 3), (True, 60), (False, None)])
)
def test_torch_path_equals_the_oracle(
    lengths: list[int], heads: int, groups: int, kind: tuple[bool, int | None]
) -> None:
    tensors = inputs(lengths, heads, groups)
    options = {"causal": kind[0], "window": kind[1], "scale": 0.7}
    for a, b in zip(
        run(tensors, lengths, backend="torch", **options),
        run(tensors, lengths, backend="naive", **options),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.sampled_from([None, 0.5, 30.0]), st.booleans(), st.sampled_from([None, 3]), st.integers(1, 6))
def test_soft_caps_sinks_and_narrow_values_equal_the_oracle(
    lengths: list[int], soft_cap: float | None, sinks: bool, window: int | None, width: int
) -> None:
    q, k, v = inputs(lengths, 2, 2)
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    tensors = [q, k, v[..., :width].detach().requires_grad_(), *([logits] if sinks else [])]
    results = []
    for backend in ("torch", "naive"):
        options = {"window": window, "soft_cap": soft_cap, "backend": backend}
        o = packed_attention(*tensors[:3], cumulative(lengths), sinks=logits if sinks else None, **options)
        weights = torch.arange(o.numel(), dtype=o.dtype).reshape(o.shape).cos()
        results.append((o, *torch.autograd.grad((o * weights).sum(), tensors)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(1, 60), st.sampled_from([None, 0.5]))
def test_chunks_equal_the_oracle(lengths: list[int], chunk: int, soft_cap: float | None) -> None:
    tensors, options = inputs(lengths, 2, 2), {"chunk": chunk, "soft_cap": soft_cap}
    results = [run(tensors, lengths, backend=backend, **options) for backend in ("torch", "naive")]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["torch", "naive"])
def test_a_chunk_is_counted_from_the_start_of_its_sequence(backend: str) -> None:
    """The mask of transformers' `chunked_overlay`: i // chunk == j // chunk."""
    q, k, v = inputs([5, 7])
    got = packed_attention(q, k, v, cumulative([5, 7]), scale=1.0, chunk=3, backend=backend)
    for first, last in ((0, 5), (5, 12)):
        place = torch.arange(last - first)
        seen = (place[:, None] >= place) & (place[:, None] // 3 == place // 3)
        scores = (q[first:last, 0] @ k[first:last, 0].T).masked_fill(~seen, -torch.inf)
        torch.testing.assert_close(got[first:last, 0], scores.softmax(-1) @ v[first:last, 0])


@pytest.mark.parametrize("options", [{"chunk": 0}, {"chunk": 3, "causal": False}, {"chunk": 3, "window": 2}])
def test_a_chunk_that_has_no_meaning_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="chunk must be at least 1 and needs causal=True and no window"):
        packed_attention(*inputs([4]), cumulative([4]), **options)


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.sampled_from([None, 3, 60]), st.sampled_from([None, 4]))
def test_alibi_equals_the_oracle(lengths: list[int], window: int | None, chunk: int | None) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.1, 3.0], dtype=torch.float64)
    options = {"window": None if chunk else window, "chunk": chunk, "alibi": slopes}
    results = [run(inputs(lengths, 2, 2), lengths, backend=backend, **options) for backend in ("torch", "naive")]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_alibi_is_the_bias_of_bloom() -> None:
    """Transformers adds slope times a key's position: the same up to a constant of the row."""
    slopes = 2.0 ** -torch.arange(1, 5, dtype=torch.float64)
    q, k, v = inputs([5, 7], heads=4)
    got = packed_attention(q, k, v, cumulative([5, 7]), scale=1.0, alibi=slopes)
    for first, last in ((0, 5), (5, 12)):
        place = torch.arange(last - first)
        scores = torch.einsum("ihd,jhd->hij", q[first:last], k[first:last]) + (slopes[:, None] * place)[:, None]
        weights = scores.masked_fill(place[:, None] < place, -torch.inf).softmax(-1)
        torch.testing.assert_close(got[first:last], torch.einsum("hij,jhd->ihd", weights, v[first:last]))


@pytest.mark.parametrize("options", [{"causal": False}, {"soft_cap": 1.0}, {"sinks": torch.zeros(1)}])
def test_alibi_that_has_no_meaning_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="alibi needs causal=True, and neither soft_cap nor sinks"):
        packed_attention(*inputs([4]), cumulative([4]), alibi=torch.ones(1), **options)


def test_the_varlen_kernel_takes_none_of_them() -> None:
    q, k, v = inputs([4])
    for options in ({"soft_cap": 1.0}, {"sinks": torch.zeros(1)}, {"alibi": torch.ones(1)}):
        with pytest.raises(ValueError, match="the varlen kernel takes no soft cap, no sinks"):
            packed_attention(q, k, v, cumulative([4]), backend="varlen", **options)


@pytest.mark.parametrize("backend", ["naive", "torch"])
def test_scores_are_scaled_by_the_root_of_the_head_size_as_torch_does(backend: str) -> None:
    q, k, v = inputs([7], heads=2, groups=2, dim=6)
    heads_first = [t.transpose(0, 1)[None] for t in (q, k, v)]
    whole = torch.nn.functional.scaled_dot_product_attention
    expected = whole(heads_first[0], heads_first[1], heads_first[2], is_causal=True, enable_gqa=True)
    torch.testing.assert_close(packed_attention(q, k, v, cumulative([7]), backend=backend), expected[0].transpose(0, 1))


def test_gradcheck() -> None:
    lengths = [40, 1, 3]
    tensors = inputs(lengths, 1, 2, 2)
    assert torch.autograd.gradcheck(
        lambda *t: packed_attention(*t, cumulative(lengths)).reshape(44, -1)[[0, 39, 40, 42]], tensors
    )


def test_nothing_crosses_a_boundary_not_even_nan() -> None:
    lengths = [40, 5, 38]
    for options in ({}, {"window": 4}, {"causal": False}):
        tensors = inputs(lengths, 2, 2, dtype=torch.float32)
        with torch.no_grad():
            before = packed_attention(*tensors, cumulative(lengths), **options)
            for t in tensors:
                t[40:45] = float("nan")
            after = packed_attention(*tensors, cumulative(lengths), **options)
        assert torch.equal(before[:40], after[:40])
        assert torch.equal(before[45:], after[45:])


def test_autocast_casts_as_it_does_for_torch_attention() -> None:
    lengths = [40, 3]
    q, k, v = inputs(lengths, 2, 2, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        o = packed_attention(q, k, v.bfloat16(), cumulative(lengths))
    assert o.dtype == torch.bfloat16
    exact = packed_attention(*(t.bfloat16().double() for t in (q, k, v)), cumulative(lengths))
    assert ((o.double() - exact).norm() / exact.norm()).item() < 1e-2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5000), max_size=40))
def test_buckets_hold_every_sequence_once_and_waste_little(lengths: list[int]) -> None:
    groups = buckets(lengths)
    assert sorted(i for g in groups for i in g) == [i for i, n in enumerate(lengths) if n]
    for group in groups:
        longest = max(lengths[i] for i in group)
        assert longest <= 32 or min(lengths[i] for i in group) >= 0.75 * longest


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": torch.randn(5, 3, 8), "v": torch.randn(5, 3, 8)}, "4 query heads are no multiple of the 3 key heads"),
        ({"v": torch.randn(5, 1, 8)}, "q must be"),
        ({"window": 3, "causal": False}, "window must be at least 1 and needs causal=True"),
        ({"v": torch.randn(5, 2, 8).bfloat16()}, "q, k and v must have one dtype"),
        ({"window": 0}, "window must be at least 1"),
        ({"cu_seqlens": cumulative([6])}, "ends at 6, but there are 5"),
        ({"backend": "varlen"}, "cannot run with backend 'varlen': needs a CUDA device"),
        ({"backend": "flash"}, "no backend 'flash'; choose from auto, varlen, torch, naive"),
    ],
)
def test_bad_calls_are_named(change: dict[str, Any], text: str) -> None:
    call = {
        "q": torch.randn(5, 4, 8),
        "k": torch.randn(5, 2, 8),
        "v": torch.randn(5, 2, 8),
        "cu_seqlens": cumulative([5]),
    }
    with pytest.raises(ValueError, match=text):
        packed_attention(**{**call, **change})

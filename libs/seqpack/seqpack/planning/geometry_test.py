import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpack.planning.geometry import alignment, packed_geometry


def test_example() -> None:
    # Three sequences for two zigzag context ranks: each a multiple of four.
    g = packed_geometry([7, 3, 17], align=alignment(cp=2), bucket=16)
    assert g.aligned == (8, 4, 20)
    assert g.cu_seqlens == (0, 8, 12, 32)
    assert g.padding == 0
    assert packed_geometry([7, 3, 17], align=4, bucket=(16, 64, 48)).cu_seqlens == (0, 8, 12, 32, 48)


def test_alignment() -> None:
    assert alignment() == 1
    assert alignment(tp=8) == 8
    assert alignment(tp=2, cp=4) == 16
    assert alignment(tp=2, cp=4, layout="contiguous") == 8
    assert alignment(tp=2, cp=1, layout="zigzag") == 2


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 9), st.integers(1, 5), st.booleans())
def test_boundaries(lengths: list[int], align: int, factor: int, bucketed: bool) -> None:
    bucket = align * factor if bucketed else None
    g = packed_geometry(lengths, align, bucket)
    widths = [b - a for a, b in zip(g.cu_seqlens, g.cu_seqlens[1:], strict=False)]
    expected = [next(n for n in range(length, length + align) if n % align == 0) for length in lengths]
    assert widths[: len(lengths)] == expected
    assert widths[len(lengths) :] == ([g.padding] if g.padding else [])
    assert g.total == sum(expected) + g.padding
    assert g.max_seqlen == max(widths, default=0)
    if bucket is None:
        assert g.padding == 0
    else:
        assert g.total % bucket == 0
        assert g.padding < bucket


@given(st.lists(st.integers(1, 50), max_size=12), st.lists(st.integers(1, 700), min_size=1, max_size=5))
def test_smallest_bucket_is_taken(lengths: list[int], buckets: list[int]) -> None:
    fitting = [b for b in buckets if b >= sum(lengths)]
    if fitting:
        assert packed_geometry(lengths, 1, buckets).total == min(fitting)
    else:
        with pytest.raises(ValueError, match="exceed the largest bucket"):
            packed_geometry(lengths, 1, buckets)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: packed_geometry([3, 0]), r"lengths\[1\] must be at least 1, got 0"),
        (lambda: packed_geometry([3], align=0), "align must be a positive integer"),
        (lambda: packed_geometry([3], align=4, bucket=6), "bucket 6 is not a multiple of align 4"),
        (lambda: packed_geometry([3], align=4, bucket=[8, 6]), "bucket 6 is not a multiple of align 4"),
        (lambda: packed_geometry([3], bucket=[]), "exceed the largest bucket 0"),
        (lambda: packed_geometry([3], bucket=True), "bucket must be a positive integer"),
        (lambda: alignment(tp=0), "tp must be a positive integer"),
        (lambda: alignment(layout="striped"), "'zigzag' or 'contiguous', got 'striped'"),
    ],
)
def test_bad_input_is_named(call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpack.planning.padding import alignment, packed_geometry, usable_capacity


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


def test_the_usable_capacity_is_whole_buckets() -> None:
    assert usable_capacity(100) == 100
    assert usable_capacity(100, align=16) == 96
    assert usable_capacity(100, align=4, bucket=64) == 64
    assert usable_capacity(100, bucket=(128, 48, 80)) == 80


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=12),
    st.integers(1, 900),
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(1, 5), st.lists(st.integers(1, 90), min_size=1, max_size=4)),
)
def test_what_fits_the_usable_capacity_is_laid_out_within_the_capacity(
    lengths: list[int], capacity: int, align: int, factor: int | list[int] | None
) -> None:
    bucket = [align * f for f in factor] if isinstance(factor, list) else factor and align * factor
    least = min(bucket) if isinstance(bucket, list) else bucket or align
    if least > capacity:
        with pytest.raises(ValueError, match="over the capacity"):
            usable_capacity(capacity, align, bucket)
        return
    usable = usable_capacity(capacity, align, bucket)
    used = sum(-(-length // align) * align for length in lengths)
    try:
        total = packed_geometry(lengths, align, bucket).total
    except ValueError:
        total = None  # over the largest bucket
    assert (used <= usable) == (total is not None and total <= capacity)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: packed_geometry([3, 0]), r"lengths\[1\] must be at least 1, got 0"),
        (lambda: packed_geometry([3], align=0), "align must be a positive integer"),
        (lambda: packed_geometry([3], align=4, bucket=6), "bucket 6 is not a multiple of align 4"),
        (lambda: packed_geometry([3], align=4, bucket=[8, 6]), "bucket 6 is not a multiple of align 4"),
        (lambda: packed_geometry([3], bucket=[]), "bucket is empty"),
        (lambda: usable_capacity(7, align=8), "align 8 is over the capacity 7"),
        (lambda: usable_capacity(7, bucket=[16, 8]), "the smallest bucket 8 is over the capacity 7"),
        (lambda: usable_capacity(64, 8, 12), "bucket 12 is not a multiple of align 8"),
        (lambda: usable_capacity(0), "capacity must be a positive integer"),
        (lambda: packed_geometry([3], bucket=True), "bucket must be a positive integer"),
        (lambda: alignment(tp=0), "tp must be a positive integer"),
        (lambda: alignment(layout="striped"), "'zigzag' or 'contiguous', got 'striped'"),  # type: ignore[arg-type]
    ],
)
def test_bad_input_is_named(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()

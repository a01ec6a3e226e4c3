"""Where each sequence of a packed row begins, computed from lengths alone, so that every rank computes the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from seqpack.planning.checks import check_lengths, check_positive_int

Bucket = int | tuple[int, ...] | None
"""What rows are padded to: a multiple, sizes to choose from, or nothing."""


@dataclass(frozen=True)
class PackedGeometry:
    """The layout of a packed row of `total` tokens.

    `lengths` are true lengths, `aligned` what each sequence occupies, `cu_seqlens` the n + 1 boundaries (n + 2 when
    there is a trailing pad of `padding` tokens, which is a sequence of its own).
    """

    lengths: tuple[int, ...]
    aligned: tuple[int, ...]
    cu_seqlens: tuple[int, ...]
    padding: int

    @property
    def total(self) -> int:
        """Tokens of the row, padding included."""
        return self.cu_seqlens[-1]

    @property
    def max_seqlen(self) -> int:
        """The longest stretch between two boundaries, the trailing pad included; 0 for an empty row."""
        return max((*self.aligned, self.padding), default=0)

    @property
    def fill(self) -> float:
        """True tokens over tokens of the row; 1.0 for an empty row."""
        return sum(self.lengths) / self.total if self.total else 1.0


def packed_geometry(
    lengths: Sequence[int], align: int = 1, bucket: int | Sequence[int] | None = None
) -> PackedGeometry:
    """Return the layout of sequences one after another, each rounded up to a multiple of `align`, the row to a bucket.

    `bucket` is a multiple to round the row up to, or the sizes to choose from (the smallest that fits is taken).
    Buckets must be multiples of `align`. ValueError when the row is longer than the largest bucket.
    """
    sizes = check_lengths(lengths)
    step = check_positive_int(align, "align")
    aligned = [aligned_length(size, step) for size in sizes]
    used = sum(aligned)
    total = _bucket_size(used, step, bucket)
    bounds = [0, *accumulate(aligned)]
    if total > used:
        bounds.append(total)
    return PackedGeometry(tuple(sizes), tuple(aligned), tuple(bounds), total - used)


def check_aligned(lengths: Sequence[int], align: int, capacity: int) -> list[int]:
    """Return the lengths rounded up to `align`. ValueError names the one that is then over the capacity."""
    name = "lengths" if align == 1 else f"lengths aligned to {align}"
    return check_lengths([aligned_length(length, align) for length in lengths], capacity, name)


def frozen_bucket(bucket: int | Sequence[int] | None) -> Bucket:
    """Return the bucket as a plan keeps it: sizes to choose from as a sorted tuple."""
    return bucket if bucket is None or isinstance(bucket, int) else tuple(sorted(bucket))


def aligned_length(length: int, align: int) -> int:
    """Return `length` rounded up to a multiple of `align`."""
    return -(-length // align) * align


def usable_capacity(capacity: int, align: int = 1, bucket: int | Sequence[int] | None = None) -> int:
    """Return the number of aligned tokens that fit in a row padded to a bucket and never longer than `capacity`.

    Planning with this capacity and lengths rounded up to `align` makes the cap hold for what `packed_geometry` lays
    out. ValueError when `align` or the smallest bucket exceeds the capacity.
    """
    cap, step = check_positive_int(capacity, "capacity"), check_positive_int(align, "align")
    sizes = [step] if bucket is None else _buckets(bucket, step)
    fitting = [size for size in sizes if size <= cap]
    if not fitting:
        name = "align" if bucket is None else "the smallest bucket"
        raise ValueError(f"{name} {min(sizes)} is over the capacity {cap}: lower it, or raise the capacity")
    return max(fitting) if isinstance(bucket, Sequence) else cap // fitting[0] * fitting[0]


def alignment(tp: int = 1, cp: int = 1, layout: Literal["zigzag", "contiguous"] = "zigzag") -> int:
    """Return the divisor of each sequence's padded length under tensor (sequence) and context parallelism.

    Zigzag gives every rank two chunks of each sequence: 2 * cp * tp where cp > 1; contiguous: cp * tp.
    """
    tensor, context = check_positive_int(tp, "tp"), check_positive_int(cp, "cp")
    if layout not in ("zigzag", "contiguous"):
        raise ValueError(f"layout must be 'zigzag' or 'contiguous', got {layout!r}")
    return tensor * context * (2 if layout == "zigzag" and context > 1 else 1)


def _bucket_size(used: int, align: int, bucket: int | Sequence[int] | None) -> int:
    if bucket is None:
        return used
    sizes = _buckets(bucket, align)
    if isinstance(bucket, int):
        return aligned_length(used, sizes[0])
    fitting = [size for size in sizes if size >= used]
    if not fitting:
        raise ValueError(f"{used} tokens (aligned to {align}) exceed the largest bucket {max(sizes, default=0)}")
    return min(fitting)


def _buckets(bucket: int | Sequence[int], align: int) -> list[int]:
    sizes = [check_positive_int(bucket, "bucket")] if isinstance(bucket, int) else check_lengths(bucket, name="bucket")
    if not sizes:
        raise ValueError("bucket is empty: name the sizes to choose from, or None for any")
    for size in sizes:
        if size % align:
            raise ValueError(f"bucket {size} is not a multiple of align {align}")
    return sizes

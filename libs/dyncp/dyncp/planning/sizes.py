"""How many tokens a rank holds of a packed stream, and how many ranks a sequence needs. Pure arithmetic.

The one owner of padding: plans check their cap with `local_tokens`, and `dyncp.pack_group` pads to its result.
"""

import math
from collections.abc import Sequence
from typing import Literal

from seqpack.planning.padding import aligned_length

Layout = Literal["contiguous", "zigzag"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag")


def local_cp_size(longest: int, max_tokens_per_rank: int, world_size: int) -> int:
    """Return longest / max_tokens_per_rank rounded up to a power of two, at most the world: a micro-batch's CP size.

    This is the rule of dynamic context parallelism as it first appeared: one size for the whole micro-batch.
    `dyncp.plan` chooses a size for every group instead. ValueError where even the whole world cannot hold the sequence.
    """
    if longest < 1 or max_tokens_per_rank < 1 or world_size < 1:
        raise ValueError(
            "longest, max_tokens_per_rank and world_size must be positive, "
            f"got {longest}, {max_tokens_per_rank} and {world_size}"
        )
    needed = ceil_div(longest, max_tokens_per_rank)
    if needed > world_size:
        raise ValueError(
            f"a sequence of {longest} tokens needs {needed} ranks at {max_tokens_per_rank} tokens a rank, the world "
            f"has {world_size}: raise max_tokens_per_rank to {ceil_div(longest, world_size)} or cut the sequence"
        )
    return min(1 << (needed - 1).bit_length(), world_size)


def sequence_align(cp_size: int, layout: Layout) -> int:
    """Return the multiple to which each sequence is padded for sharding: 2 x cp_size in zigzag, 1 in contiguous."""
    check_layout(layout)
    return 2 * cp_size if layout == "zigzag" and cp_size > 1 else 1


def rank_align(cp_size: int, layout: Layout, align: int = 1) -> int:
    """Return the multiple to which the tokens of each rank are padded.

    align: the multiple that kernels or sharding need: the tensor-parallel size where activations are split by
    tokens, 16 for FP8 products, a bucket for kernels that are tuned for few shapes. Zigzag gives each rank two halves.
    """
    check_layout(layout)
    return math.lcm(align, 2) if layout == "zigzag" and cp_size > 1 else align


def local_tokens(lengths: Sequence[int], cp_size: int, layout: Layout, align: int = 1) -> int:
    """Return the tokens that each rank of a group holds, padding included, for sequences of these lengths.

    Zigzag pads every sequence to 2 x cp_size; then the end of the stream is padded until every rank holds the same
    multiple of `rank_align`.
    """
    each, multiple = sequence_align(cp_size, layout), rank_align(cp_size, layout, align)
    tokens = sum(lengths) if each == 1 else sum(aligned_length(length, each) for length in lengths)
    return aligned_length(ceil_div(tokens, cp_size), multiple)


def group_room(cp_size: int, max_tokens_per_rank: int, layout: Layout, align: int = 1) -> int:
    """Return the tokens (padded to `sequence_align`) that a group can hold under the cap; 0 if not even a dummy."""
    multiple = rank_align(cp_size, layout, align)
    return cp_size * (max_tokens_per_rank // multiple * multiple)


def check_layout(layout: str) -> None:
    """Raise ValueError unless the layout is one of LAYOUTS."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not known: choose one of {', '.join(LAYOUTS)}")


def ceil_div(a: int, b: int) -> int:
    """Return the smallest integer at least a / b."""
    return -(-a // b)

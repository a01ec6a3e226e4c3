"""How many tokens a rank holds of a packed stream, and how many ranks a sequence needs. Pure arithmetic.

The one owner of padding: plans check their cap with `local_tokens`, and `dyncp.pack_group` pads to what it says.
"""

import math
from collections.abc import Sequence
from typing import Literal

from seqpack.planning.padding import aligned_length

Layout = Literal["contiguous", "zigzag"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag")


def local_cp_size(longest: int, max_tokens_per_rank: int, world_size: int) -> int:
    """Context-parallel size for one micro-batch: longest / max_tokens_per_rank, up to a power of two, at most the
    world.

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
    """Return the multiple each sequence is padded to before it is sharded: 2 x cp_size in zigzag, nothing in
    contiguous."""
    check_layout(layout)
    return 2 * cp_size if layout == "zigzag" and cp_size > 1 else 1


def rank_align(cp_size: int, layout: Layout, align: int = 1) -> int:
    """Return what the tokens of each rank are a multiple of.

    align: what kernels or sharding ask of a rank's tokens: the tensor-parallel size where activations are split by
    tokens, 16 for FP8 products, a bucket for kernels that are tuned for few shapes. Zigzag gives each rank two halves.
    """
    check_layout(layout)
    return math.lcm(align, 2) if layout == "zigzag" and cp_size > 1 else align


def local_tokens(lengths: Sequence[int], cp_size: int, layout: Layout, align: int = 1) -> int:
    """Return tokens each rank of a group holds, padding included, when sequences of these lengths are packed over it.

    Zigzag pads every sequence to 2 x cp_size; then the end of the stream is padded until every rank holds the same
    multiple of `rank_align`.
    """
    each, multiple = sequence_align(cp_size, layout), rank_align(cp_size, layout, align)
    tokens = sum(lengths) if each == 1 else sum(aligned_length(length, each) for length in lengths)
    return aligned_length(ceil_div(tokens, cp_size), multiple)


def group_room(cp_size: int, max_tokens_per_rank: int, layout: Layout, align: int = 1) -> int:
    """Return tokens, sequences padded as `sequence_align` says, that a group can hold under the cap: 0 where not even a
    dummy fits.
    """
    multiple = rank_align(cp_size, layout, align)
    return cp_size * (max_tokens_per_rank // multiple * multiple)


def check_layout(layout: str) -> None:
    """ValueError unless the layout is one of LAYOUTS."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not known: choose one of {', '.join(LAYOUTS)}")


def ceil_div(a: int, b: int) -> int:
    """Return the smallest integer at least a / b."""
    return -(-a // b)

"""How many tokens a rank holds of a packed stream, and how many ranks a sequence needs. Pure arithmetic."""

from collections.abc import Sequence
from typing import Literal

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
    """The multiple each sequence is padded to before it is sharded: 2 x cp_size in zigzag, nothing in contiguous."""
    check_layout(layout)
    return 2 * cp_size if layout == "zigzag" and cp_size > 1 else 1


def local_tokens(lengths: Sequence[int], cp_size: int, layout: Layout) -> int:
    """Tokens each rank of a group holds, padding included, when sequences of these lengths are packed over it.

    Zigzag pads every sequence to 2 x cp_size; contiguous pads the end of the stream to cp_size.
    """
    align = sequence_align(cp_size, layout)
    return ceil_div(sum(ceil_div(length, align) * align for length in lengths), cp_size)


def check_layout(layout: str) -> None:
    """ValueError unless the layout is one of LAYOUTS."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not known: choose one of {', '.join(LAYOUTS)}")


def ceil_div(a: int, b: int) -> int:
    """The smallest integer at least a / b."""
    return -(-a // b)

"""Lengths of sequences on both sides of every threshold of a config."""

from collections.abc import Mapping

FIRST = (7, 12)
"""The first two sequences, which planted errors join."""
SHORT = (2, 19, 1)


def proof_lengths(thresholds: Mapping[str, int], longest: int = 33) -> tuple[int, ...]:
    """Return lengths: one token, a few, the longest, and for each threshold t: t - 1, t, t + 1 and 2 t + 1.

    Behind the first two, long and short ones alternate, so that a packed row mixes both sides of each threshold.
    """
    crossing = {length for t in thresholds.values() for length in (t - 1, t, t + 1, 2 * t + 1)}
    left = sorted({*SHORT, *crossing, longest} - {0, *FIRST})
    mixed = list(FIRST)
    while left:
        mixed.append(left.pop(0 if len(left) % 2 else -1))
    return tuple(mixed)

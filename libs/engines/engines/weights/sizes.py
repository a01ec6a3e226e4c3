"""Sizes of weights on their way, which a plan reads: nothing slow is imported."""

PIECE_BYTES = 64 * 2**20
"""Bytes of a piece of exported weights, about."""

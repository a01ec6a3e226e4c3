"""The seconds of decoding as a function of the rows that are decoded together, fitted to what a run measured.

A pass that decodes one token of each of n rows takes `decode_s + row_s x n` seconds. Summed over a step's passes that
is `decode_s x passes + row_s x tokens`: two unknowns, which steps of different loads determine.
"""

from collections.abc import Sequence
from typing import NamedTuple

APART = 1.1
"""Loads are two where the most rows of a step's passes, on average, are so many times the fewest."""


class DecodeLoad(NamedTuple):
    """The load of a step: `tokens` decoded in `passes` passes."""

    passes: float
    tokens: float

    @property
    def rows(self) -> float:
        """The mean number of rows of a pass."""
        return self.tokens / self.passes


def fit_decode_cost(loads: Sequence[DecodeLoad], seconds: Sequence[float]) -> tuple[float, float]:
    """Return (decode_s, row_s) by least squares over steps with these loads and seconds; neither is below 0.

    With one load alone, or without each step's seconds, decode_s is unknown. All seconds then grow with the rows: no
    part of a step counts as free.
    """
    apart = max(load.rows for load in loads) >= APART * min(load.rows for load in loads)
    if not apart or len(set(seconds)) == 1:
        return 0.0, sum(seconds) / sum(load.tokens for load in loads)
    n, t = [load.passes for load in loads], [load.tokens for load in loads]
    nn, nt, tt, ns, ts = _dot(n, n), _dot(n, t), _dot(t, t), _dot(n, seconds), _dot(t, seconds)
    decode_s, row_s = (ns * tt - ts * nt) / (nn * tt - nt * nt), (ts * nn - ns * nt) / (nn * tt - nt * nt)
    if decode_s < 0:
        return 0.0, ts / tt
    if row_s < 0:
        return ns / nn, 0.0
    return decode_s, row_s


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))

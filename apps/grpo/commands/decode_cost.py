"""How the seconds of decoding grow with the rows that are decoded together, from what a run measured.

A pass that decodes one token of each of n rows takes `decode_s + row_s x n` seconds. Summed over a step's passes that
is `decode_s x passes + row_s x tokens`: two unknowns, which steps of different loads tell apart.
"""

from collections.abc import Sequence
from typing import NamedTuple

APART = 1.1
"""Loads are two where the most rows of a step's passes, on average, are so many times the fewest."""


class Load(NamedTuple):
    """What a step decoded: `tokens`, in so many `passes`."""

    passes: float
    tokens: float

    @property
    def rows(self) -> float:
        """Of a pass, on average."""
        return self.tokens / self.passes


def fitted(loads: Sequence[Load], seconds: Sequence[float]) -> tuple[float, float]:
    """Return (decode_s, row_s), by least squares over steps of these loads, which took these seconds; neither is below
    0.

    Where only one load was seen, or each step's seconds are not known, nothing says what fewer rows would take. All of
    the seconds are then taken to grow with the rows: no part of a step is thought free.
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

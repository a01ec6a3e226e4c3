"""Length mixes that reinforcement learning and fine-tuning produce: seeded, for tests and benchmarks."""

from collections.abc import Callable

import numpy as np

from seqpack.planning.bounds import Ints
from seqpack.planning.checks import check_positive_int


def lognormal(count: int, longest: int, seed: int = 0, median: float = 0.07, sigma: float = 1.0) -> Ints:
    """Return lengths of instruction data: a lognormal whose median is that fraction of `longest`, cut off at
    `longest`."""
    draws = np.random.default_rng(seed).lognormal(np.log(median * longest), sigma, _count(count))
    return np.clip(draws, 1, longest).astype(np.int64)


def bimodal(count: int, longest: int, seed: int = 0, long_share: float = 0.3) -> Ints:
    """Return lengths of rollouts: short answers, and a share of long chains of thought near 0.73 of `longest`."""
    rng = np.random.default_rng(seed)
    short = rng.lognormal(np.log(0.04 * longest), 0.6, _count(count))
    long = rng.normal(0.73 * longest, 0.12 * longest, count)
    return np.clip(np.where(rng.random(count) < long_share, long, short), 16, longest).astype(np.int64)


def truncated(count: int, longest: int, seed: int = 0, limit: float = 0.5) -> Ints:
    """Return lengths of rollouts with a response limit: two lognormals, and a spike where answers were cut off."""
    rng = np.random.default_rng(seed)
    short = rng.lognormal(np.log(0.067 * longest), 0.7, _count(count))
    long = rng.lognormal(np.log(0.5 * longest), 0.5, count)
    return np.clip(np.where(rng.random(count) < 0.6, short, long), 16, int(limit * longest)).astype(np.int64)


MIXES: dict[str, Callable[..., Ints]] = {"lognormal": lognormal, "bimodal": bimodal, "truncated": truncated}


def _count(count: int) -> int:
    return check_positive_int(count, "count")

"""Bounds: how far a sampler's log-probs may lie from the trainer's on average, by what the two compute in.

The bound is of the mean |difference| over tokens. The largest difference is told, not bounded: where two answers are
nearly equal, bfloat16 moves single tokens by 1 and more, in any implementation.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BOUNDS = {"bfloat16": 0.05, "float16": 0.02, "float32": 1e-3, "float64": 1e-3}
"""By the dtype that is computed in. Measurements, and figures of other projects: docs/certificates.md, "Samplers"."""
LOW_PRECISION = {"weights": 0.1, "cache": 0.1}
"""What is added where the weights, or the keys and values of earlier tokens, are kept in fewer bits than that."""
ROUNDING = "rounding"
"""Kind of a setting that changes the order of sums alone: nothing is added."""
LOOSE = 10.0
"""Factor of a bound that was accepted by name."""
UNTESTED = "sampler"
"""That name."""


@dataclass(frozen=True)
class SamplerBound:
    """Bound of the mean difference of log-probs, and what it is made of."""

    mean: float
    dtype: str
    """The coarser dtype of sampler and trainer."""
    settings: tuple[str, ...] = ()
    """Settings of the sampler that change its numbers, as NAME=VALUE."""
    loose: bool = False
    """Whether it was accepted by name that the sampler is further off."""

    @property
    def reason(self) -> str:
        """What explains such a difference."""
        return " with ".join([self.dtype, *([", ".join(self.settings)] if self.settings else [])])

    @property
    def advice(self) -> str:
        """What to do about a larger one."""
        leave = f"leave out {' or '.join(self.settings)}, or " if self.settings else ""
        if self.loose:
            return f"{leave}sample another way: the bound is widened already"
        return (
            f"{leave}accept it by name with --allow-untested {UNTESTED} (RolloutSettings.allow_untested), which "
            f"widens the bound to {LOOSE * self.mean:g} and is recorded"
        )


def sampler_bound(
    dtype: str,
    trainer_dtype: str = "float32",
    settings: Mapping[str, str] | None = None,
    allow_untested: Collection[str] = (),
) -> SamplerBound:
    """Return the bound of a sampler and a trainer that compute in these dtypes.

    `settings`: those of the sampler that change its numbers, as NAME=VALUE, each with its kind: a key of
    `LOW_PRECISION`, or `ROUNDING`. `allow_untested`: names that the user accepted.

    Raises:
        ValueError: a dtype or a kind is unknown.
    """
    settings = settings or {}
    for what, known in (
        *((dtype, BOUNDS) for dtype in (dtype, trainer_dtype)),
        *((kind, {*LOW_PRECISION, ROUNDING}) for kind in settings.values()),
    ):
        if what not in known:
            raise ValueError(f"a sampler's numbers are of {what!r}: it must be one of {', '.join(sorted(known))}")
    coarser = max(dtype, trainer_dtype, key=lambda name: BOUNDS[name])
    loose = UNTESTED in allow_untested
    mean = BOUNDS[coarser] + sum(LOW_PRECISION[kind] for kind in {*settings.values()} - {ROUNDING})
    return SamplerBound(mean * LOOSE if loose else mean, coarser, tuple(settings), loose)


def read_bound(plain: Mapping[str, Any]) -> SamplerBound:
    """Return the bound that JSON holds (`dataclasses.asdict`)."""
    return SamplerBound(**{**plain, "settings": tuple(plain["settings"])})


def widest(bounds: Sequence[SamplerBound]) -> SamplerBound:
    """Return the largest of several samplers' bounds."""
    return max(bounds, key=lambda bound: bound.mean)

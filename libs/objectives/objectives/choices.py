"""Names that the objectives' settings take, and their checks, which import no torch: a command line reads them."""

from typing import TYPE_CHECKING, Literal, get_args

from objectives.checks import check_number
from objectives.registry import Registry
from seqpack.extensions.load_object import is_user_code

if TYPE_CHECKING:  # slow to load, and a command line needs none of it
    from objectives.advantages import Estimator as AdvantageEstimator
    from objectives.losses import PolicyLoss

Aggregation = Literal["token", "sequence", "constant"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
Estimator = Literal["k1", "k2", "k3", "k1+", "k3+"]
KL_ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
Divergence = Literal["forward", "reverse", "jsd"]
DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)
Correction = Literal[
    "none", "truncate", "mask", "sequence_truncate", "sequence_mask", "geometric_truncate", "geometric_mask"
]
CORRECTIONS: tuple[Correction, ...] = get_args(Correction)
LARGEST_CAP = 1e8
"""The largest cap of importance weights: below exp(HIGHEST) of `objectives.ratio`, so that what lies above a cap is
still seen to."""
HIGH_COVARIANCE = "high_covariance"
"""Key of a batch: the tokens that clip_cov and kl_cov treat apart (`objectives.covariance_losses.high_covariance`)."""
OPTIONS = ("clip_low", "clip_high", "dual_clip")
LOSS_OPTIONS: dict[str, tuple[str, ...]] = {
    "ppo": OPTIONS,
    "cispo": ("clip_low", "clip_high"),
    "gspo": ("clip_low", "clip_high"),
    "gmpo": ("clip_low", "clip_high"),
    "sapo": (),
    "dppo_tv": ("clip_low", "clip_high"),
    "dppo_kl": ("clip_low", "clip_high"),
    "clip_cov": ("clip_low", "clip_high"),
    "kl_cov": (),
}
"""Those of `OPTIONS` that each policy loss of `objectives.losses` takes."""
GROUP_SIZES = {
    "grpo": 2,
    "dr_grpo": 2,
    "rloo": 2,
    "maxrl": 2,
    "gdpo": 2,
    "turn_grpo": 2,
    "reinforce_plus_plus": 1,
    "reinforce_plus_plus_baseline": 2,
}
"""The smallest group of each advantage of `objectives.advantages`."""
POLICY_LOSSES: "Registry[PolicyLoss]" = Registry("policy_loss", "objectives.losses", LOSS_OPTIONS, "loss")
ESTIMATORS: "Registry[AdvantageEstimator]" = Registry("advantage", "objectives.advantages", GROUP_SIZES)
ESTIMATORS.add_alias("leave_one_out", "rloo")


def loss_options(name: str) -> tuple[str, ...]:
    """Return the options that a policy loss takes; ValueError for an unknown one."""
    return LOSS_OPTIONS[name] if name in LOSS_OPTIONS else tuple(POLICY_LOSSES.named(name).defaults)


def check_group_size(name: str, group_size: int) -> None:
    """Raise ValueError for an unknown advantage, or if groups of this size get none other than 0."""
    ESTIMATORS.check_known(name)
    sizes = {other: _least_group(other) for other in ESTIMATORS}
    least = _least_group(ESTIMATORS.listed_name(name))
    if group_size < least:
        free = [other for other, size in sizes.items() if size <= group_size]
        instead = f", or the advantage {' or '.join(free)}" if free else ""
        raise ValueError(
            f"the advantage {ESTIMATORS.listed_name(name)!r} compares siblings, in groups of {group_size} it is always "
            f"0: use a group size of at least {least}{instead}"
        )


def _least_group(name: str) -> int:
    return GROUP_SIZES.get(name) or ESTIMATORS[name].min_group_size


def check_loss_options(name: str, words: tuple[str, ...], field: str = "policy_loss_options") -> None:
    """Raise ValueError for NAME=VALUE words that are no options of a loss, or lack one that must be given.

    `field`: the setting that has the words.
    """
    if words or is_user_code(name):
        POLICY_LOSSES.named(name).with_options(words, field)


def check_advantage_options(name: str, words: tuple[str, ...]) -> None:
    """Raise ValueError for NAME=VALUE words that are no options of an advantage, or lack one that must be given."""
    if words or is_user_code(name):
        ESTIMATORS.named(name).with_options(words)


def check_clips(clip_low: float | None = None, clip_high: float | None = None, dual_clip: float | None = None) -> None:
    """Raise ValueError for clip_low outside [0, 1], clip_high below 0 or dual_clip not above 1; None is allowed."""
    if clip_low is not None:
        check_number("clip_low", clip_low, 0, 1)
    if clip_high is not None:
        check_number("clip_high", clip_high, 0)
    if dual_clip is not None:
        check_number("dual_clip", dual_clip, 1, above=True)


def check_max_tokens(max_tokens: int | None) -> int:
    """Return the fixed length that aggregation "constant" divides by. Raise ValueError unless it is at least 1."""
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise ValueError(
            f"aggregation 'constant' needs max_tokens >= 1, the longest answer the sampler may give: got {max_tokens!r}"
        )
    return max_tokens

"""Weights for tokens that another distribution sampled, and measures of how far apart the two are.

The sampler (a rollout engine: other kernels, other precision, perhaps older weights) draws tokens with
`rollout_log_probs`; the trainer scores the same tokens with the policy the update starts from. The weight is their
probability ratio, truncated: biased a little, of bounded variance. Everything here is constant to autograd.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from objectives.checks import check_choice, check_number, check_without_effect
from objectives.choices import CORRECTIONS as CORRECTIONS
from objectives.choices import LARGEST_CAP
from objectives.choices import Correction as Correction
from objectives.ratio import LOWEST, clamped, ratio, ratio_excess, sequence_ratios
from objectives.sums import wide


def truncated_weights(trainer_log_probs: Tensor, rollout_log_probs: Tensor, cap: float = 2.0) -> Tensor:
    """Return min(p_trainer / p_rollout, cap), a token: truncated importance sampling (Ionides 2008)."""
    _check_cap(cap)
    return ratio(trainer_log_probs.detach(), rollout_log_probs.detach()).clamp(max=cap)


def masked_weights(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, cap: float = 2.0, floor: float | None = None
) -> Tensor:
    """Return the ratio where it lies in [floor, cap], else 0: tokens of larger mismatch are not trained.

    IcePop (arXiv 2510.18855, section 3: 0.5 and 5). `floor` None: 1 / cap.
    """
    low = check_bounds(cap, floor)
    weight = ratio(trainer_log_probs.detach(), rollout_log_probs.detach())
    return torch.where((weight > cap) | (weight < (1 / cap if low is None else low)), 0.0, weight)  # NaN stays NaN


def sequence_weights(
    trainer_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    cap: float = 2.0,
    mask: bool = False,
    floor: float | None = None,
    geometric_mean: bool = False,
) -> Tensor:
    """Return one weight a sequence: the product of its trained tokens' ratios, truncated at cap.

    f[T] again. Unbiased before truncation, unlike token weights, and of far higher variance for long sequences
    (importance weights of trajectories: Precup et al. 2000).
    `mask`: 0 above cap and, where it is given, below `floor`. `geometric_mean`: the root of the number of tokens in
    place of the product (GSPO's ratio, arXiv 2507.18071, equation 7), which does not grow with the length; with `mask`,
    `floor` is 1 / cap where it is not given, and a sequence that drifted is left out whole.
    """
    low = check_bounds(cap, floor)
    weight = sequence_ratios(
        trainer_log_probs.detach(), rollout_log_probs.detach(), loss_mask, cu_seqlens, geometric_mean
    )
    if low is None:
        low = 1 / cap if geometric_mean else 0.0
    weight = torch.where((weight > cap) | (weight < low), 0.0, weight) if mask else weight.clamp(max=cap)
    return torch.repeat_interleave(weight, cu_seqlens.diff(), output_size=loss_mask.numel())


def weights(
    correction: Correction,
    trainer_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    cap: float = 2.0,
    floor: float | None = None,
) -> Tensor:
    """Return the weights by the correction's name, f[T].

    ValueError for an unknown one, a cap out of [1, 1e8], and a floor out of [0, 1] or where nothing is masked.
    """
    check_choice("off-policy correction", correction, CORRECTIONS)
    masks = correction.endswith("mask")
    if not masks:
        check_without_effect("floor", floor, f"the correction {correction!r} leaves nothing out")
    if correction == "none":
        return torch.ones_like(wide(rollout_log_probs))
    if correction == "truncate":
        return truncated_weights(trainer_log_probs, rollout_log_probs, cap)
    if correction == "mask":
        return masked_weights(trainer_log_probs, rollout_log_probs, cap, floor)
    geometric = correction.startswith("geometric")
    return sequence_weights(
        trainer_log_probs, rollout_log_probs, loss_mask, cu_seqlens, cap, masks, floor, geometric_mean=geometric
    )


EDGES: tuple[float, ...] = tuple(2.0 ** (half / 2) for half in range(-28, 9))
"""Edges of the histogram of |difference|: half octaves, from bfloat16 rounding to wrong weights."""


def mismatch(trainer_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
    """Measure the mismatch between the trainer's and the sampler's log-probs, as metrics (see `seqpack.Objective`).

    `mismatch/abs` mean |difference|, `mismatch/abs/max` its maximum, `mismatch/kl` the k3 estimate of KL(rollout ||
    trainer), `mismatch/clamped` the share of tokens beyond the bounds of `objectives.ratio` (a difference counts as
    100 at most); and means that add up over micro-batches and ranks, of which `mismatch_meter` makes the rest.
    """
    trainer, rollout = (torch.where(loss_mask, wide(x.detach()), 0.0) for x in (trainer_log_probs, rollout_log_probs))
    count = loss_mask.sum()
    size = (trainer - rollout).abs().clamp(max=-LOWEST)
    largest = size.max() if size.numel() else size.new_zeros(())
    weight = torch.where(loss_mask, ratio(trainer, rollout), 0.0)
    above = (size[:, None] > torch.tensor(EDGES, dtype=size.dtype, device=size.device)).sum(0)
    return {
        "mismatch/abs": torch.stack([size.sum(), count]),
        "mismatch/abs/max": largest,
        "mismatch/clamped": torch.stack([clamped(trainer, rollout).sum(), count]),
        "mismatch/kl": torch.stack([ratio_excess(trainer, rollout).sum(), count]),
        "mismatch/weight": torch.stack([weight.sum(), count]),
        "mismatch/weight_square": torch.stack([weight.square().sum(), count]),
        **{_above(edge): torch.stack([many, count]) for edge, many in zip(EDGES, above, strict=True)},
    }


def mismatch_meter(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with `mismatch/ess` and `mismatch/p99` in place of the means that they are computed from.

    `mismatch/ess`: the effective sample size of the importance weights trainer / rollout as a share of the tokens,
    (sum w)^2 / (n sum w^2), 1 where the two policies are equal (Kong, 1992). `mismatch/p99`: 99 % of the tokens have a
    smaller |difference|; read from a histogram in half octaves, so that it adds up over ranks, and right to a factor of
    1.42: interpolated on a log scale, 0 below the first edge, the maximum above the last. Other metrics stay as they
    are, and all do where those of `mismatch` are missing (another objective).
    """
    if "mismatch/weight_square" not in metrics:
        return dict(metrics)
    square = metrics["mismatch/weight_square"]
    made_of = {"mismatch/weight", "mismatch/weight_square", *map(_above, EDGES)}
    others = {name: value for name, value in metrics.items() if name not in made_of}
    ess = metrics["mismatch/weight"] ** 2 / square if square else 0.0
    return others | {"mismatch/ess": ess, "mismatch/p99": _quantile([metrics[_above(edge)] for edge in EDGES], metrics)}


def _quantile(shares: Sequence[float], metrics: Mapping[str, float], level: float = 0.01) -> float:
    """Return the difference that a share `level` of the tokens exceeds. `shares`: tokens above each edge, falling."""
    below = next((place for place, share in enumerate(shares) if share <= level), None)
    if below is None:
        return metrics["mismatch/abs/max"]
    if below == 0:
        return 0.0
    high, low = shares[below - 1], shares[below]
    step = EDGES[below] / EDGES[below - 1]
    return EDGES[below - 1] * math.pow(step, (high - level) / (high - low))


def _above(edge: float) -> str:
    return f"mismatch/above_{edge:g}"


def _check_cap(cap: float) -> None:
    check_number("the cap of importance weights", cap, 1, LARGEST_CAP)


def check_bounds(cap: float, floor: float | None) -> float | None:
    """Return the floor; ValueError for a cap out of [1, 1e8] or a floor out of [0, 1]."""
    _check_cap(cap)
    if floor is not None:
        check_number("the floor of importance weights", floor, 0, 1)
    return floor

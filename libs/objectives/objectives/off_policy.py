"""Weights for tokens that another distribution sampled, and measures of how far apart the two are.

The sampler (a rollout engine: other kernels, other precision, perhaps older weights) draws tokens with
`rollout_log_probs`; the trainer scores the same tokens with the policy the update starts from. The weight is their
probability ratio, truncated: biased a little, of bounded variance. Everything here is constant to autograd.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from objectives.checks import check_choice, check_number
from objectives.losses import sequence_sums

Correction = Literal["none", "truncate", "mask", "sequence_truncate", "sequence_mask"]
CORRECTIONS: tuple[Correction, ...] = get_args(Correction)


def truncated_weights(trainer_log_probs: Tensor, rollout_log_probs: Tensor, cap: float = 2.0) -> Tensor:
    """Return min(p_trainer / p_rollout, cap), a token: truncated importance sampling (Ionides 2008)."""
    _check_cap(cap)
    return torch.exp((trainer_log_probs - rollout_log_probs).detach()).clamp(max=cap)


def masked_weights(trainer_log_probs: Tensor, rollout_log_probs: Tensor, cap: float = 2.0) -> Tensor:
    """Return the ratio where it lies in [1 / cap, cap], else 0: tokens on which the two disagree badly do not train."""
    _check_cap(cap)
    ratio = torch.exp((trainer_log_probs - rollout_log_probs).detach())
    return torch.where((ratio <= cap) & (ratio >= 1 / cap), ratio, 0.0)


def sequence_weights(
    trainer_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    cap: float = 2.0,
    mask: bool = False,
) -> Tensor:
    """Return one weight a sequence: the product of its trained tokens' ratios, truncated at cap (`mask`: 0 above cap).

    f32[T] again. Unbiased before truncation, unlike token weights, and of far higher variance for long sequences.
    """
    _check_cap(cap)
    gap = torch.where(loss_mask, (trainer_log_probs - rollout_log_probs).detach(), 0.0)
    log_ratio = sequence_sums(gap, cu_seqlens).clamp(max=60.0)  # exp(60) is finite in float32 and beyond any cap
    ratio = torch.exp(log_ratio)
    weight = torch.where(ratio <= cap, ratio, 0.0) if mask else ratio.clamp(max=cap)
    return torch.repeat_interleave(weight, cu_seqlens.diff(), output_size=gap.numel())


def weights(
    correction: Correction,
    trainer_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    cap: float = 2.0,
) -> Tensor:
    """Return the weights by the correction's name, f32[T]. ValueError for an unknown one and a cap below 1."""
    check_choice("off-policy correction", correction, CORRECTIONS)
    if correction == "none":
        return torch.ones_like(rollout_log_probs)
    if correction == "truncate":
        return truncated_weights(trainer_log_probs, rollout_log_probs, cap)
    if correction == "mask":
        return masked_weights(trainer_log_probs, rollout_log_probs, cap)
    drop = correction == "sequence_mask"
    return sequence_weights(trainer_log_probs, rollout_log_probs, loss_mask, cu_seqlens, cap, mask=drop)


def mismatch(trainer_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
    """Measure how far apart the trainer's and the sampler's log-probs are, as metrics (see `seqpack.Objective`).

    `mismatch/abs` mean |difference|, `mismatch/abs/max` its maximum, `mismatch/kl` the k3 estimate of KL(rollout ||
    trainer).
    """
    gap = torch.where(loss_mask, (trainer_log_probs - rollout_log_probs).detach(), 0.0)
    count = loss_mask.sum()
    size = gap.abs()
    largest = size.max() if size.numel() else size.new_zeros(())
    return {
        "mismatch/abs": torch.stack([size.sum(), count]),
        "mismatch/abs/max": largest,
        "mismatch/kl": torch.stack([(torch.expm1(gap) - gap).sum(), count]),
    }


def _check_cap(cap: float) -> None:
    check_number("the cap of importance weights", cap, 1)

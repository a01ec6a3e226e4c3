"""Per-token policy losses, and the ways of adding them up to one number.

All are functions of packed f32[T] tensors; a loss is minimised. The old policy's log-probs and the advantages are
constants: no gradient flows to them.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence", "constant"]


class Clipped(NamedTuple):
    """What a clipped loss gives: per-token losses, and where a clip decided them (bool[T] each), for metrics."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor


def policy_gradient(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """-A log pi: REINFORCE, the gradient of expected reward with samples of the current policy."""
    return -advantages.detach() * log_probs


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Clipped:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) with rho = pi / pi_old, a token.

    PPO (arXiv 1707.06347, equation 7); two bounds are "clip-higher" of DAPO (arXiv 2503.14476, section 3.1: 0.2 and
    0.28). `dual_clip` c > 1 bounds the loss of a token with a negative advantage by -c A (arXiv 1912.09729, equation
    5): without it a large ratio makes it unbounded.
    """
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise ValueError(f"clip_low must be in [0, 1] and clip_high >= 0, got {clip_low} and {clip_high}")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1 (or None), got {dual_clip}")
    advantage = advantages.detach()
    ratio = torch.exp(log_probs - old_log_probs.detach())
    plain = -ratio * advantage
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    loss = torch.maximum(plain, bounded)
    negative = advantage < 0
    clipped_low = (ratio < 1 - clip_low) & negative
    clipped_high = (ratio > 1 + clip_high) & (advantage > 0)
    clipped_dual = torch.zeros_like(negative)
    if dual_clip is not None:
        ceiling = -dual_clip * advantage
        clipped_dual = negative & (loss > ceiling)
        loss = torch.where(clipped_dual, ceiling, loss)
    return Clipped(loss, ratio.detach(), clipped_low, clipped_high, clipped_dual)


def cispo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_low: float = 1.0, clip_high: float = 0.28
) -> Clipped:
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi: CISPO of MiniMax-M1 (arXiv 2506.13585, equation 4).

    The clip bounds the weight of a token and never takes its gradient away.
    """
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise ValueError(f"clip_low must be in [0, 1] and clip_high >= 0, got {clip_low} and {clip_high}")
    ratio = torch.exp(log_probs.detach() - old_log_probs.detach())
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -weight * advantages.detach() * log_probs
    return Clipped(loss, ratio, ratio < 1 - clip_low, ratio > 1 + clip_high, torch.zeros_like(ratio, dtype=torch.bool))


def aggregate(
    per_token: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    how: Aggregation,
    tokens: int,
    sequences: int,
    max_tokens: int | None = None,
) -> Tensor:
    """This micro-batch's share of the global loss: its sum over micro-batches and ranks is the loss.

    `per_token` f32[T], `loss_mask` bool[T], `cu_seqlens` i32[n+1]; `tokens` and `sequences` count what is trained in
    the whole step.

    - "token": sum / tokens. Every token weighs the same (DAPO, arXiv 2503.14476, section 3.3).
    - "sequence": mean over each sequence's trained tokens, then over sequences (GRPO, arXiv 2402.03300, equation 3).
    - "constant": sum / (sequences * max_tokens) with a fixed `max_tokens` (Dr. GRPO, arXiv 2503.20783): no length bias.
    """
    masked = torch.where(loss_mask, per_token, 0.0)
    if how == "token":
        return masked.sum() / max(tokens, 1)
    if how == "constant":
        if max_tokens is None or max_tokens < 1:
            raise ValueError("aggregation 'constant' needs max_tokens >= 1: the longest answer the sampler may give")
        return masked.sum() / (max(sequences, 1) * max_tokens)
    if how != "sequence":
        raise ValueError(f"unknown aggregation {how!r}: use 'token', 'sequence' or 'constant'")
    trained = sequence_sums(loss_mask.to(masked.dtype), cu_seqlens)
    return (sequence_sums(masked, cu_seqlens) / trained.clamp(min=1)).sum() / max(sequences, 1)


def sequence_sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum of each packed sequence: f[T], i32[n+1] -> f[n]; differentiable."""
    lengths = cu_seqlens.diff().to(torch.int64)
    owner = torch.repeat_interleave(torch.arange(lengths.numel(), device=values.device), lengths)
    return values.new_zeros(lengths.numel()).index_add(0, owner, values)

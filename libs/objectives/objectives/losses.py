"""Per-token policy losses, and their sums to one number.

All are functions of packed f[T] tensors, computed in float32 at least; a loss is minimised. The old policy's log-probs
and the advantages are constants: no gradient flows to them. Ratios are those of `objectives.ratio`, bounded. What a
loss of your own reads and returns, and how it gets a name: `objectives.policy_loss`.
"""

import torch
from torch import Tensor

from objectives.checks import check_choice
from objectives.choices import AGGREGATIONS as AGGREGATIONS
from objectives.choices import HIGH_COVARIANCE, check_clips, check_max_tokens
from objectives.choices import OPTIONS as OPTIONS
from objectives.choices import POLICY_LOSSES as POLICY_LOSSES
from objectives.choices import Aggregation as Aggregation
from objectives.covariance_losses import high_covariance as high_covariance
from objectives.covariance_losses import kl_cov as kl_cov
from objectives.policy_loss import PolicyLoss as PolicyLoss
from objectives.policy_loss import PolicyTokens as PolicyTokens
from objectives.policy_loss import TokenLoss as TokenLoss
from objectives.policy_loss import entry_of as entry_of
from objectives.policy_loss import own_token_loss as own_token_loss
from objectives.policy_loss import register_policy_loss as register_policy_loss
from objectives.ratio import ratio as ratio_of
from objectives.sequence_losses import gmpo as gmpo
from objectives.sequence_losses import gspo as gspo
from objectives.sums import sequence_sums, wide
from objectives.trust_losses import dppo_kl as dppo_kl
from objectives.trust_losses import dppo_tv as dppo_tv
from objectives.trust_losses import sapo as sapo


def policy_gradient(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Return -A log pi: REINFORCE (Williams 1992, theorem 1), the gradient of expected reward with samples of the
    current policy."""
    return -wide(advantages.detach()) * wide(log_probs)


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Return -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) with rho = pi / pi_old, a token.

    PPO (arXiv 1707.06347, equation 7); two bounds are "clip-higher" of DAPO (arXiv 2503.14476, section 3.1: 0.2 and
    0.28). `dual_clip` c > 1 bounds the loss of a token with a negative advantage by -c A (arXiv 1912.09729):
    without it a large ratio makes it unbounded. Metrics: ratio; clip/low, clip/high and (where it is set) clip/dual,
    the tokens whose gradient that bound cut.
    """
    check_clips(clip_low, clip_high, dual_clip)
    advantage = wide(advantages.detach())
    ratio = ratio_of(log_probs, old_log_probs.detach())
    plain = -ratio * advantage
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    loss = torch.maximum(plain, bounded)
    negative = advantage < 0
    metrics = {
        "ratio": ratio.detach(),
        "clip/low": (ratio < 1 - clip_low) & negative,
        "clip/high": (ratio > 1 + clip_high) & (advantage > 0),
    }
    if dual_clip is not None:
        ceiling = -dual_clip * advantage
        cut = negative & (loss > ceiling)
        loss = torch.where(cut, ceiling, loss)
        metrics["clip/dual"] = cut
    return TokenLoss(loss, metrics)


def cispo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_low: float = 1.0, clip_high: float = 0.28
) -> TokenLoss:
    """Return -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi: CISPO (MiniMax-M1, arXiv 2506.13585).

    The clip bounds the weight of a token and never removes its gradient. Metrics: ratio, clip/low, clip/high.
    """
    check_clips(clip_low, clip_high)
    ratio = ratio_of(log_probs.detach(), old_log_probs.detach())
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    metrics = {"ratio": ratio, "clip/low": ratio < 1 - clip_low, "clip/high": ratio > 1 + clip_high}
    return TokenLoss(-weight * wide(advantages.detach()) * wide(log_probs), metrics)


def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    chosen: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenLoss:
    """Return PPO's clipped loss, and 0 at the chosen tokens, bool[T]: Clip-Cov (arXiv 2505.22617).

    The tokens are those of `objectives.covariance_losses`. Metrics: PPO's, and clip/covariance.
    """
    loss, metrics = ppo_clip(log_probs, old_log_probs, advantages, clip_low, clip_high)
    return TokenLoss(loss * ~chosen, {**metrics, "clip/covariance": chosen})


@register_policy_loss("ppo", scales_with_advantage=True, clip_low=0.2, clip_high=0.2, dual_clip=None)
def _ppo(tokens: PolicyTokens, clip_low: float, clip_high: float, dual_clip: float | None) -> TokenLoss:
    return ppo_clip(tokens.log_probs, tokens.old_log_probs, tokens.advantages, clip_low, clip_high, dual_clip)


@register_policy_loss("cispo", scales_with_advantage=True, clip_low=1.0, clip_high=0.28)
def _cispo(tokens: PolicyTokens, clip_low: float, clip_high: float) -> TokenLoss:
    return cispo(tokens.log_probs, tokens.old_log_probs, tokens.advantages, clip_low, clip_high)


@register_policy_loss("clip_cov", keys=(HIGH_COVARIANCE,), scales_with_advantage=True, clip_low=0.2, clip_high=0.2)
def _clip_cov(tokens: PolicyTokens, clip_low: float, clip_high: float) -> TokenLoss:
    chosen = tokens.batch.values[HIGH_COVARIANCE].bool()
    return clip_cov(tokens.log_probs, tokens.old_log_probs, tokens.advantages, chosen, clip_low, clip_high)


def aggregate(
    per_token: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    how: Aggregation,
    tokens: int,
    sequences: int,
    max_tokens: int | None = None,
    row_tokens: Tensor | None = None,
) -> Tensor:
    """Return this micro-batch's share of the global loss: its sum over micro-batches and ranks is the loss.

    `per_token` f[T], `loss_mask` bool[T], `cu_seqlens` i32[n+1]; `tokens` and `sequences`: trained ones of the
    whole step.

    - "token": sum / tokens. Every token weighs the same (DAPO, arXiv 2503.14476, section 3.3).
    - "sequence": mean over each sequence's trained tokens, then over sequences (GRPO, arXiv 2402.03300, equation 3).
      An answer of several sequences counts once: `sequences` is then the number of answers, and `row_tokens` i64[n]
      the trained tokens of the whole answer that each sequence is of.
    - "constant": sum / (sequences * max_tokens) with a fixed `max_tokens` (Dr. GRPO, arXiv 2503.20783, section
      3.2): no length bias.
    """
    masked = torch.where(loss_mask, wide(per_token), 0.0)
    if how == "token":
        return masked.sum() / max(tokens, 1)
    if how == "constant":
        return masked.sum() / (max(sequences, 1) * check_max_tokens(max_tokens))
    check_choice("aggregation", how, AGGREGATIONS)
    trained = sequence_sums(loss_mask, cu_seqlens)
    if row_tokens is not None:  # cu_seqlens may end with a pad, a sequence of nothing
        trained[: len(row_tokens)] = row_tokens.to(trained)
    return (sequence_sums(masked, cu_seqlens) / trained.clamp(min=1)).sum() / max(sequences, 1)

"""Policy losses that bound the step of a token by other means than PPO's clip: SAPO's gate, DPPO's divergence."""

import torch
from torch import Tensor

from objectives.checks import check_number
from objectives.choices import check_clips
from objectives.policy_loss import PolicyTokens, TokenLoss, register_policy_loss
from objectives.ratio import binary_kl, probability_change
from objectives.ratio import ratio as ratio_of
from objectives.sums import wide


def sapo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> TokenLoss:
    """Return -(4 / tau) sigmoid(tau (rho - 1)) A with tau by the sign of A: SAPO (arXiv 2511.20347).

    The gate falls off smoothly where PPO cuts; at rho = 1 the gradient is the policy gradient. The paper averages over
    sequences: aggregation "sequence". Metrics: ratio.
    """
    check_number("tau_pos", tau_pos, 0, above=True)
    check_number("tau_neg", tau_neg, 0, above=True)
    advantage = wide(advantages.detach())
    ratio = ratio_of(log_probs, old_log_probs.detach())
    tau = torch.where(advantage > 0, tau_pos, tau_neg).to(ratio.dtype)
    return TokenLoss(-torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * advantage, {"ratio": ratio.detach()})


def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: float = 20.0,
) -> TokenLoss:
    """Return -sg(min(rho, ratio_cap)) A log pi where the probability moved within bounds, else 0.

    DPPO with the binary total variation (arXiv 2602.04879): a token is left out where pi - pi_old is above clip_high
    and A > 0, or below -clip_low and A < 0. Metrics: ratio, clip/low, clip/high.
    """
    check_clips(clip_low, clip_high)
    moved = probability_change(log_probs.detach(), old_log_probs.detach())
    return _within(log_probs, old_log_probs, advantages, moved < -clip_low, moved > clip_high, ratio_cap)


def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.05,
    clip_high: float = 0.05,
    ratio_cap: float = 20.0,
) -> TokenLoss:
    """Return what `dppo_tv` does, bounded by KL(old || new) between the token and all others together, in nats.

    DPPO with the binary KL divergence (arXiv 2602.04879). A bound cuts only a token that moved the way its advantage
    pushes it.
    """
    check_clips(clip_low, clip_high)
    new, old = (wide(x.detach()) for x in (log_probs, old_log_probs))
    divergence = binary_kl(old, new)
    low, high = (divergence > clip_low) & (new < old), (divergence > clip_high) & (new > old)
    return _within(log_probs, old_log_probs, advantages, low, high, ratio_cap)


def _within(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, low: Tensor, high: Tensor, ratio_cap: float
) -> TokenLoss:
    """Return the weighted policy gradient of the tokens that no bound cuts."""
    check_number("ratio_cap", ratio_cap, 1)
    advantage = wide(advantages.detach())
    ratio = ratio_of(log_probs.detach(), old_log_probs.detach())
    low, high = low & (advantage < 0), high & (advantage > 0)
    loss = torch.where(low | high, 0.0, -ratio.clamp(max=ratio_cap) * advantage * wide(log_probs))
    return TokenLoss(loss, {"ratio": ratio, "clip/low": low, "clip/high": high})


@register_policy_loss("sapo", scales_with_advantage=True)
def _sapo(tokens: PolicyTokens, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    return sapo(tokens.log_probs, tokens.old_log_probs, tokens.advantages, tau_pos, tau_neg)


@register_policy_loss("dppo_tv", scales_with_advantage=True, clip_low=0.2, clip_high=0.2)
def _dppo_tv(tokens: PolicyTokens, clip_low: float, clip_high: float, ratio_cap: float = 20.0) -> TokenLoss:
    return dppo_tv(tokens.log_probs, tokens.old_log_probs, tokens.advantages, clip_low, clip_high, ratio_cap)


@register_policy_loss("dppo_kl", scales_with_advantage=True, clip_low=0.05, clip_high=0.05)
def _dppo_kl(tokens: PolicyTokens, clip_low: float, clip_high: float, ratio_cap: float = 20.0) -> TokenLoss:
    return dppo_kl(tokens.log_probs, tokens.old_log_probs, tokens.advantages, clip_low, clip_high, ratio_cap)

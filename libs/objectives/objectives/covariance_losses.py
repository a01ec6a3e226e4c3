"""Clip-Cov and KL-Cov: the few tokens whose covariance of advantage and log-prob is high, which make entropy collapse.

The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models (arXiv 2505.22617, section 4): a token's
covariance is (A - mean A)(log pi - mean log pi) over the trained tokens of a batch. Its statistics are of a whole
batch, so the tokens are chosen before it is split (`high_covariance`), by the policy that the update starts from, and
the losses read which they are: any split into micro-batches gives the same loss.
"""

import torch
from torch import Tensor

from objectives.checks import check_number, check_weight
from objectives.choices import HIGH_COVARIANCE
from objectives.policy_loss import PolicyTokens, TokenLoss, register_policy_loss
from objectives.ratio import log_ratio
from objectives.ratio import ratio as ratio_of
from objectives.sums import wide
from seqpack.batches.jagged import flattened, jagged_like, ragged


def high_covariance(
    advantages: Tensor,
    log_probs: Tensor,
    loss_mask: Tensor,
    share: float = 2e-4,
    bounds: tuple[float, float] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the chosen tokens, jagged bool (B, j), of `advantages`, `log_probs` and `loss_mask`, jagged (B, j).

    They are `share` of the trained tokens, at least one: those of the highest covariance (KL-Cov there), or with
    `bounds` as many as there are drawn at random from those between both (Clip-Cov; 1 and 5 there).
    """
    check_number("share", share, 0, 1)
    mask = flattened(ragged(loss_mask)).bool()
    places = mask.nonzero()[:, 0]
    count = min(max(1, int(share * len(places))), len(places))
    advantage, log_prob = (flattened(ragged(x))[places].double() for x in (advantages, log_probs))
    covariance = (advantage - advantage.mean()) * (log_prob - log_prob.mean())
    if bounds is None:
        chosen = places[covariance.topk(count).indices]
    else:
        inside = places[(covariance > bounds[0]) & (covariance < bounds[1])]
        chosen = inside[torch.randperm(len(inside), generator=generator)[:count].to(inside.device)]
    return jagged_like(torch.zeros_like(mask).index_fill(0, chosen, True), loss_mask)


def kl_cov(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, chosen: Tensor, coef: float = 1.0
) -> TokenLoss:
    """Return -rho A, and coef |log rho| more at the chosen tokens, bool[T]: KL-Cov (arXiv 2505.22617).

    Metrics: ratio, clip/covariance.
    """
    check_weight("coef", coef)
    gap = log_ratio(log_probs, old_log_probs.detach())
    ratio = ratio_of(log_probs, old_log_probs.detach())
    loss = -ratio * wide(advantages.detach()) + torch.where(chosen, coef * gap.abs(), 0.0)
    return TokenLoss(loss, {"ratio": ratio.detach(), "clip/covariance": chosen})


@register_policy_loss("kl_cov", keys=(HIGH_COVARIANCE,))
def _kl_cov(tokens: PolicyTokens, coef: float = 1.0) -> TokenLoss:
    chosen = tokens.batch.values[HIGH_COVARIANCE].bool()
    return kl_cov(tokens.log_probs, tokens.old_log_probs, tokens.advantages, chosen, coef)

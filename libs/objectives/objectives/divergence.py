"""Divergences of a policy from a teacher over K tokens and all others together, a number a token.

Both distributions are those of K + 1 events: each of the K tokens, and any other. Their divergence is one of
distributions, so at least 0, and 0 where they agree; it is at most that of the whole vocabulary, and equal to it where
one token is left. A sum over the K tokens alone is none of this: it falls below 0 where the policy puts more on them.
"""

import torch
from torch import Tensor

from objectives.checks import check_choice, check_number
from objectives.choices import DIVERGENCES, Divergence
from objectives.sums import wide

LOWEST = -100.0
"""Log-probs are bounded to it from below: beyond it, e^-100, a divergence has no gradient."""


def events(log_probs: Tensor, rest: Tensor, tokens: Tensor) -> Tensor:
    """Return f[K + 1, T], log-probs of the K events f[K, T] and the rest f[T], bounded; of no token (-1) `LOWEST`."""
    return torch.cat([wide(log_probs).masked_fill(tokens < 0, LOWEST), wide(rest)[None]]).clamp(min=LOWEST)


def divergence(policy: Tensor, teacher: Tensor, kind: Divergence = "forward", jsd_weight: float = 0.5) -> Tensor:
    """Return f[T] of log-probs f[K + 1, T] of events; the gradient flows to the policy.

    - "forward": KL(teacher || policy), which a policy must cover (Hinton et al., arXiv 1503.02531, section 2).
    - "reverse": KL(policy || teacher), which seeks modes (MiniLLM, arXiv 2306.08543).
    - "jsd": w KL(teacher || m) + (1 - w) KL(policy || m) with m = w teacher + (1 - w) policy, the generalised
      Jensen-Shannon divergence (GKD, arXiv 2306.13649).
    """
    check_choice("divergence", kind, DIVERGENCES)
    teacher = teacher.detach()
    if kind == "forward":
        return _kl(teacher, policy)
    if kind == "reverse":
        return _kl(policy, teacher)
    check_number("jsd_weight", jsd_weight, 0, 1)
    if jsd_weight in (0, 1):
        raise ValueError(f"jsd_weight={jsd_weight} makes the divergence 0: it lies between")
    weight = teacher.new_tensor(jsd_weight)
    mixed = torch.logaddexp(teacher + weight.log(), policy + torch.log1p(-weight))
    return weight * _kl(teacher, mixed) + (1 - weight) * _kl(policy, mixed)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    return (one.exp() * (one - other)).sum(0)

"""Group-relative advantages: one number a sequence from the rewards of its group, and its spread over tokens.

Every function takes `rewards` f[B] and `groups` i[B] (equal numbers are siblings: samples of one prompt) and returns
float32 [B]. The arithmetic is float64, and a group whose rewards are all equal gets exact zeros, so that it gives no
gradient at all.
"""

import torch
from torch import Tensor


def grpo(rewards: Tensor, groups: Tensor, normalize_std: bool = True, eps: float = 1e-6, correction: int = 1) -> Tensor:
    """(reward - mean of the group) / (std of the group + eps): GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2.

    `normalize_std=False` keeps the numerator alone, see `dr_grpo`. `correction=1` is the sample standard deviation (n -
    1 below the fraction), 0 the population's. A group of one sample gets 0: it says nothing about itself.
    """
    value, group, count = _check(rewards, groups)
    if eps < 0 or correction not in (0, 1):
        raise ValueError(f"eps must be >= 0 and correction 0 or 1, got eps={eps}, correction={correction}")
    centred = value - (_sum(value, group, count) / count)[group]
    if normalize_std:
        variance = _sum(centred.square(), group, count) / (count - correction).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)[group]
    return _finish(centred, value, group, count)


def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """reward - mean of the group, with no division: Dr. GRPO (arXiv 2503.20783), section 3.2.

    Use it with the loss aggregation "constant", the other half of that paper's correction.
    """
    return grpo(rewards, groups, normalize_std=False)


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """reward - mean of the siblings' rewards without its own: RLOO (arXiv 2402.14740). A group of one sample gets 0."""
    value, group, count = _check(rewards, groups)
    others = (count - 1).clamp(min=1)
    baseline = (_sum(value, group, count)[group] - value) / others[group]
    return _finish(value - baseline, value, group, count)


def per_token(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Spread one advantage a sequence over its tokens.

    `advantages` f[B]; `loss_mask` jagged bool (B, j). Returns jagged float32 (B, j): the sequence's advantage at
    trained tokens and 0 elsewhere, ready to be the batch's `advantages`.
    """
    from seqpack.batches.batch import jagged

    rows = list(loss_mask.unbind())
    if advantages.ndim != 1 or advantages.shape[0] != len(rows):
        shape = tuple(advantages.shape)
        raise ValueError(f"advantages must have one number for each of the {len(rows)} rows of loss_mask, got {shape}")
    return jagged([mask.to(torch.float32) * value for mask, value in zip(rows, advantages.float(), strict=True)])


def _check(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards in float64, group numbers made dense, and the size of each group (float64)."""
    if rewards.ndim != 1 or groups.shape != rewards.shape:
        shapes = f"{tuple(rewards.shape)} and {tuple(groups.shape)}"
        raise ValueError(f"rewards and groups must be one-dimensional and of one length, got {shapes}")
    value = rewards.detach().to(torch.float64)
    if not bool(torch.isfinite(value).all()):
        row = int((~torch.isfinite(value)).nonzero()[0])
        raise ValueError(f"the reward of row {row} is {float(value[row])}: rewards must be finite")
    _, group = torch.unique(groups, return_inverse=True)
    count = torch.bincount(group).to(torch.float64)
    return value, group, count


def _sum(value: Tensor, group: Tensor, count: Tensor) -> Tensor:
    return torch.zeros_like(count).index_add_(0, group, value)


def _finish(advantage: Tensor, value: Tensor, group: Tensor, count: Tensor) -> Tensor:
    """Exact zeros for groups of equal rewards (rounding of the mean must not be blown up by 1 / eps), as float32."""
    low = torch.full_like(count, torch.inf).scatter_reduce_(0, group, value, "amin")
    high = torch.full_like(count, -torch.inf).scatter_reduce_(0, group, value, "amax")
    return torch.where((low == high)[group], 0.0, advantage).to(torch.float32)

"""Advantages that differ from token to token: rewards of turns, returns with KL in the reward, their normalisation.

A *turn* is a run of trained tokens in a row, and its reward stands at the last of them.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from objectives.checks import check_weight
from objectives.kl import k1
from seqpack.batches.jagged import flattened, jagged_like, ragged


def returns_with_kl(
    rewards: Tensor, loss_mask: Tensor, log_probs: Tensor, ref_log_probs: Tensor, kl_coef: float
) -> Tensor:
    """Return the return of each trained token, jagged f32 (B, j): its answer's reward less the KL from it on.

    `rewards` f[B]; `loss_mask`, `log_probs`, `ref_log_probs` jagged (B, j). The reward of a token is -kl_coef (log pi -
    log ref), k1, and that of the last one has the answer's reward too (arXiv 2203.02155, equation 2; REINFORCE++,
    arXiv 2501.03262). Tokens between the trained ones pass it on. Raises ValueError for a kl_coef below 0.
    """
    check_weight("kl_coef", kl_coef)
    parts = ragged(loss_mask)
    mask = flattened(parts).bool()
    new, ref = (torch.where(mask, flattened(ragged(x)), 0.0) for x in (log_probs, ref_log_probs))
    cost = kl_coef * k1(new, ref).double()
    rows = [
        reward.double() - values.flip(0).cumsum(0).flip(0)
        for reward, values in zip(rewards, cost.split(parts.lengths), strict=True)
    ]
    return jagged_like(torch.where(mask, torch.cat(rows), 0.0).float(), loss_mask)


def at_turn_ends(rewards: Sequence[Sequence[float]], loss_mask: Tensor) -> Tensor:
    """Return the rewards of turns at their last tokens, jagged f32 (B, j) like `loss_mask`, and NaN elsewhere.

    `rewards`: of each row, a number a turn; turns that have none get 0. Raises ValueError for more numbers than turns.
    """
    rows = []
    for place, (given, mask) in enumerate(zip(rewards, loss_mask.unbind(), strict=True)):
        ends = (mask & ~torch.cat([mask[1:], mask.new_zeros(1)])).nonzero()[:, 0]
        if len(given) > len(ends):
            raise ValueError(f"row {place} has {len(ends)} turns and {len(given)} turn rewards: give one a turn")
        numbers = torch.zeros(len(ends))
        numbers[: len(given)] = torch.tensor(given, dtype=torch.float32)
        rows.append(torch.full((len(mask),), math.nan).index_put_((ends.cpu(),), numbers))
    return jagged_like(torch.cat(rows).to(loss_mask.device), loss_mask)


def later_sums(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the sum of each trained token's number and of those after it in its row, jagged f32 (B, j), 0 elsewhere.

    `values`, `loss_mask` jagged (B, j); numbers of tokens that are not trained count too.
    """
    parts = ragged(values)
    rows = [row.flip(0).cumsum(0).flip(0) for row in flattened(parts).double().split(parts.lengths)]
    mask = flattened(ragged(loss_mask)).bool()
    return jagged_like(torch.where(mask, torch.cat(rows), 0.0).float(), loss_mask)


def normalized(values: Tensor, loss_mask: Tensor, eps: float = 1e-6) -> Tensor:
    """Return (value - mean) / (std + eps) over the trained tokens of the batch, jagged f32 (B, j), 0 elsewhere.

    REINFORCE++'s global normalisation (arXiv 2501.03262). Values that are all equal give exact zeros.
    """
    flat, mask = flattened(ragged(values)).double(), flattened(ragged(loss_mask)).bool()
    trained = flat[mask]
    if not trained.numel() or bool((trained == trained[0]).all()):
        return jagged_like(torch.zeros_like(flat).float(), loss_mask)
    spread = trained.std(correction=1 if trained.numel() > 1 else 0)
    return jagged_like(torch.where(mask, (flat - trained.mean()) / (spread + eps), 0.0).float(), loss_mask)

"""Direct preference optimisation: its loss of pairs, and the same as advantages, by which any engine can train it.

The gradient of DPO's loss is a policy gradient whose weight, one number a pair, depends on the pair's two log-probs
alone. So an update is exact without a pair in one micro-batch or on one rank: score the batch by the weights that the
update starts from, give the weights as advantages, and train with `GRPO(aggregation="constant", max_tokens=1)`.

    batch["advantages"] = dpo_advantages(log_probs, ref_log_probs, batch["loss_mask"], batch["pair"], batch["chosen"])
"""

import torch
from torch import Tensor

from objectives.advantages import per_token
from objectives.checks import check_number
from objectives.sums import wide
from seqpack.batches.jagged import flattened, ragged


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return -log sigmoid(beta margin) of each pair, f[P]: DPO (arXiv 2305.18290, equation 7).

    All f[P]: sums of the answers' log-probs by the policy and the reference; margin = (chosen - ref_chosen) - (rejected
    - ref_rejected). `label_smoothing` is the share of pairs whose labels are taken to be wrong (conservative DPO).
    """
    _check(beta, label_smoothing)
    margin = beta * ((wide(chosen) - wide(ref_chosen)) - (wide(rejected) - wide(ref_rejected)))
    right, wrong = (torch.nn.functional.logsigmoid(x) for x in (margin, -margin))
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def dpo_advantages(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    loss_mask: Tensor,
    pair: Tensor,
    chosen: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return advantages with which `GRPO(aggregation="constant", max_tokens=1)` has the gradient of the mean DPO loss.

    The weight is that of DPO's gradient (arXiv 2305.18290, section 4, where it has no number). `log_probs`,
    `ref_log_probs`, `loss_mask` jagged (B, j); `pair` i[B], equal for the two rows of a pair; `chosen`
    bool[B]. The result is jagged f32 (B, j). Raises ValueError for a pair that has not one chosen and one other row.
    """
    order = torch.argsort(pair.long() * 2 + ~chosen.bool(), stable=True)
    numbers, good = pair[order], chosen.bool()[order]
    if len(order) % 2 or not bool((numbers[0::2] == numbers[1::2]).all() & good[0::2].all() & ~good[1::2].any()):
        raise ValueError("each pair needs two rows of its number, one of them chosen")
    if len(torch.unique(pair)) != len(order) // 2:
        raise ValueError("each pair needs a number of its own")
    sums = [_row_sums(values, loss_mask)[order] for values in (log_probs, ref_log_probs)]
    with torch.enable_grad():
        policy = sums[0].detach().requires_grad_()
        losses = dpo_loss(policy[0::2], policy[1::2], sums[1][0::2], sums[1][1::2], beta, label_smoothing)
        (slope,) = torch.autograd.grad(losses.sum(), policy)
    weights = torch.empty_like(slope).index_copy_(0, order, -2 * slope)  # two rows a pair: the mean is over pairs
    return per_token(weights, loss_mask)


def _row_sums(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the sum over each row's trained tokens, f64[B]."""
    parts = ragged(loss_mask)
    kept = torch.where(flattened(parts).bool(), flattened(ragged(values)).double(), 0.0)
    rows = torch.arange(len(parts.lengths), device=kept.device)
    owner = rows.repeat_interleave(torch.tensor(parts.lengths, device=kept.device))
    return kept.new_zeros(len(parts.lengths)).index_add_(0, owner, kept)


def _check(beta: float, label_smoothing: float) -> None:
    check_number("beta", beta, 0, above=True)
    check_number("label_smoothing", label_smoothing, 0, 0.5)

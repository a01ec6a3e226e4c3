"""Log-probs over a vocabulary that tensor-parallel ranks share: each has some rows of the head, none all logits."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def shared_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int,
    entropy: bool,
    group: dist.ProcessGroup,
    first: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Return log softmax(hidden @ head.T / temperature) at the targets, and its entropy; equal on all ranks.

    `hidden` [N, H] and `targets` i64[N] are those of all ranks of `group`; `weight` [v, H] are rows of the head from
    `first` on, each row on one rank -> [N] (and [N] or None). `chunk` x v logits are alive at a time. The gradient of
    `hidden` is this rank's part: it is summed where hidden states were gathered.
    """
    log_probs, entropies = _SharedLogProbs.apply(hidden, weight, targets - first, temperature, chunk, entropy, group)
    return log_probs, entropies if entropy else None


class _SharedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, entropy: bool,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        size = weight.shape[0]
        own = (targets >= 0) & (targets < size)
        local = targets.clamp(0, size - 1)
        tokens = hidden.shape[0]
        log_probs, normalizers = (torch.empty(tokens, dtype=dtype, device=hidden.device) for _ in range(2))
        entropies = torch.zeros_like(log_probs)
        for rows in _chunks(tokens, chunk):
            logits = _logits(hidden[rows], weight, temperature)
            highest = _all(logits.amax(-1), group, dist.ReduceOp.MAX)
            exponentials = torch.exp(logits - highest.unsqueeze(1))
            chosen = logits.gather(1, local[rows].unsqueeze(1)).squeeze(1) * own[rows]
            weighted = (exponentials * logits).sum(-1) if entropy else torch.zeros_like(chosen)
            total, chosen, weighted = _all(torch.stack([exponentials.sum(-1), chosen, weighted]), group)
            normalizers[rows] = highest + total.log()
            log_probs[rows] = chosen - normalizers[rows]
            if entropy:
                entropies[rows] = normalizers[rows] - weighted / total
        ctx.save_for_backward(hidden, weight, local, own, normalizers, entropies)
        ctx.temperature, ctx.chunk, ctx.entropy = temperature, chunk, entropy
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, own, normalizers, entropies = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(weight.shape, dtype=normalizers.dtype, device=weight.device)
        for rows in _chunks(hidden.shape[0], ctx.chunk):
            log_softmax = _logits(hidden[rows], weight, ctx.temperature) - normalizers[rows].unsqueeze(1)
            probabilities = torch.exp(log_softmax)
            # d log p_target / d z = onehot - p;  d entropy / d z = -p (log p + entropy)
            grad = probabilities * -grad_log_probs[rows].unsqueeze(1)
            if ctx.entropy:
                grad -= probabilities * (log_softmax + entropies[rows].unsqueeze(1)) * grad_entropies[rows].unsqueeze(1)
            grad.scatter_add_(1, local[rows].unsqueeze(1), (grad_log_probs[rows] * own[rows]).unsqueeze(1))
            grad = (grad / ctx.temperature).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[rows]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *(None,) * 5


def _all(values: Tensor, group: dist.ProcessGroup, op: "dist.ReduceOp.RedOpType" = dist.ReduceOp.SUM) -> Tensor:
    if dist.get_world_size(group) > 1:
        dist.all_reduce(values, op=op, group=group)
    return values


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]

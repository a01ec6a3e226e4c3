"""Log-probs and entropies of chosen tokens straight from hidden states: the logits of a chunk of tokens at a time."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int = 4096,
    entropy: bool = False,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log softmax(hidden @ weight.T / temperature) at the targets, and the entropy of that softmax.

    `hidden` [N, H], `weight` [V, H], `targets` i64[N] -> f32[N] (and f32[N] or None). `soft_cap` c bounds the logits
    before the temperature: c tanh(logits / c). Never more than chunk x V logits are alive, in the backward pass too,
    which computes them again.
    """
    log_probs, entropies = _TokenLogProbs.apply(hidden, weight, targets, temperature, chunk, entropy, soft_cap)
    return log_probs, entropies if entropy else None


def token_log_probs_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `token_log_probs` from one full matrix of logits: the oracle."""
    logits = torch.nn.functional.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = (logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)) / temperature
    log_softmax = torch.log_softmax(logits, dim=-1)
    chosen = log_softmax.gather(1, targets.unsqueeze(1)).squeeze(1)
    return chosen, -(log_softmax.exp() * log_softmax).sum(-1)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        entropy: bool,
        soft_cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device)
        normalizers = torch.empty_like(log_probs)
        entropies = torch.zeros_like(log_probs)
        for rows in _chunks(hidden.shape[0], chunk):
            logits = _logits(hidden[rows], weight, temperature, soft_cap)
            normalizer = torch.logsumexp(logits, dim=-1)
            normalizers[rows] = normalizer
            log_probs[rows] = logits.gather(1, targets[rows].unsqueeze(1)).squeeze(1) - normalizer
            if entropy:
                probabilities = torch.exp(logits - normalizer.unsqueeze(1))
                entropies[rows] = normalizer - (probabilities * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, normalizers, entropies)
        ctx.temperature, ctx.chunk, ctx.entropy, ctx.soft_cap = temperature, chunk, entropy, soft_cap
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizers, entropies = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=normalizers.dtype, device=weight.device)
        for rows in _chunks(hidden.shape[0], ctx.chunk):
            logits = _logits(hidden[rows], weight, ctx.temperature, ctx.soft_cap)
            log_softmax = logits - normalizers[rows].unsqueeze(1)
            probabilities = torch.exp(log_softmax)
            # d log p_target / d z = onehot - p;  d entropy / d z = -p (log p + entropy)
            grad = probabilities * -grad_log_probs[rows].unsqueeze(1)
            if ctx.entropy:
                inner = log_softmax + entropies[rows].unsqueeze(1)
                grad -= probabilities * inner * grad_entropies[rows].unsqueeze(1)
            grad.scatter_add_(1, targets[rows].unsqueeze(1), grad_log_probs[rows].unsqueeze(1))
            if ctx.soft_cap is not None:  # d c tanh(x / c) / dx = 1 - tanh^2
                grad *= 1 - (logits * (ctx.temperature / ctx.soft_cap)).square()
            grad = (grad / ctx.temperature).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float, soft_cap: float | None) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)) / temperature


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]

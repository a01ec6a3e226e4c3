"""Log-probs and entropies from hidden states over fused kernels, in place of `scoring.log_probs.token_log_probs`.

Logits stay in the compute dtype. Where those of all tokens fit in `KEPT_BYTES` they are kept from forward to backward
and overwritten there by their gradient (one matrix product fewer); otherwise a chunk of tokens at a time is computed
in both passes, and the head's gradient is added up in float32.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from engines.fast.log_prob_kernels import gradient, statistics
from engines.fast.settings import KEPT_BYTES as KEPT_BYTES


def fused_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int = 4096,
    entropy: bool = False,
    kept_bytes: int = KEPT_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """Return log softmax(hidden @ weight.T / temperature) at the targets, and the entropy of that softmax.

    Arguments and results as `engines.scoring.log_probs.token_log_probs`; `kept_bytes` bounds what is kept for the
    backward pass.
    """
    keep = hidden.shape[0] * weight.shape[0] * hidden.element_size() <= kept_bytes
    size = max(hidden.shape[0], 1) if keep and torch.is_grad_enabled() else chunk
    log_probs, entropies = _FusedLogProbs.apply(hidden, weight, targets, temperature, size, entropy)
    return log_probs, entropies if entropy else None


class _FusedLogProbs(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        parts, logits = [], None
        for rows in _chunks(hidden.shape[0], chunk):
            logits = hidden[rows] @ weight.t()
            parts.append(statistics(logits, targets[rows], temperature, entropy))
        log_probs, normalizers, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.logits = logits if len(parts) == 1 else None  # overwritten later, so not a saved tensor
        ctx.save_for_backward(hidden, weight, targets, normalizers, entropies)
        ctx.temperature, ctx.chunk, ctx.entropy = temperature, chunk, entropy
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropies = (grad.contiguous() for grad in grads)
        hidden, weight, targets, normalizers, entropies = ctx.saved_tensors
        chunks = _chunks(hidden.shape[0], ctx.chunk)
        frozen = not ctx.needs_input_grad[1]
        total = torch.zeros_like(weight, dtype=_sum_dtype(weight)) if len(chunks) > 1 and not frozen else None
        d_hidden, d_weight = torch.empty_like(hidden), None
        for rows in chunks:
            logits, ctx.logits = ctx.logits, None
            if logits is None:
                logits = hidden[rows] @ weight.t()
            extra = (entropies[rows], grad_entropies[rows]) if ctx.entropy else ()
            d_logits = gradient(logits, targets[rows], normalizers[rows], grad_log_probs[rows], ctx.temperature, *extra)
            torch.mm(d_logits, weight, out=d_hidden[rows])
            if frozen:
                continue
            if total is None:
                d_weight = d_logits.t() @ hidden[rows]
            else:
                total = _add_product(total, d_logits.t(), hidden[rows])
        return d_hidden, d_weight if total is None else total.to(weight.dtype), None, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return total + left @ right, in the dtype of the total."""
    if total.is_cuda and total.dtype != left.dtype:
        return torch.addmm(total, left, right, out_dtype=total.dtype)
    return total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _sum_dtype(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, max(total, 1), size)]

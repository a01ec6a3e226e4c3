"""Softmax over a vocabulary, read once forward and rewritten in place backward: float32 inside the kernels alone.

Logits are [N, V] in the compute dtype, as the matrix product left them. `statistics` reads a row once, keeping a
running maximum and sums relative to it, per lane; `gradient` overwrites the logits with their gradient. Both have a
plain form beside them, which is what runs on a CPU and what the kernels are tested against.
"""

import torch
from torch import Tensor

from engines.fast.triton_kernels import triton_module


def statistics(logits: Tensor, targets: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log-probs of the targets, normalisers, entropies), each f32[N]; entropies are zeros unless asked for."""
    if not logits.is_cuda:
        return statistics_plain(logits, targets, temperature, entropy)
    rows, vocabulary = logits.shape
    log_probs, normalizers = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    entropies = torch.zeros(rows, dtype=torch.float32, device=logits.device)
    if rows:
        triton_module("log_prob_triton").statistics_kernel[(rows,)](
            logits,
            targets,
            log_probs,
            normalizers,
            entropies,
            vocabulary,
            1.0 / temperature,
            ENTROPY=entropy,
            BLOCK=4096,
            num_warps=8,
        )
    return log_probs, normalizers, entropies


def gradient(
    logits: Tensor,
    targets: Tensor,
    normalizers: Tensor,
    grad_log_probs: Tensor,
    temperature: float,
    entropies: Tensor | None = None,
    grad_entropies: Tensor | None = None,
) -> Tensor:
    """Overwrite logits with the gradient of sum(grad_log_probs * log_probs + grad_entropies * entropies)."""
    if not logits.is_cuda:
        result = gradient_plain(logits, targets, normalizers, grad_log_probs, temperature, entropies, grad_entropies)
        return logits.copy_(result)
    rows, vocabulary = logits.shape
    with_entropy = entropies is not None and grad_entropies is not None
    block = 4096
    if rows:
        triton_module("log_prob_triton").gradient_kernel[(rows, (vocabulary + block - 1) // block)](
            logits,
            targets,
            normalizers,
            grad_log_probs,
            entropies if with_entropy else normalizers,
            grad_entropies if with_entropy else grad_log_probs,
            vocabulary,
            1.0 / temperature,
            ENTROPY=with_entropy,
            BLOCK=block,
            num_warps=8,
        )
    return logits


def statistics_plain(
    logits: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `statistics` in plain torch."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    normalizers = torch.logsumexp(z, dim=-1)
    log_probs = z.gather(1, targets[:, None]).squeeze(1) - normalizers
    if not entropy:
        return log_probs, normalizers, torch.zeros_like(normalizers)
    return log_probs, normalizers, normalizers - ((z - normalizers[:, None]).exp() * z).sum(-1)


def gradient_plain(
    logits: Tensor,
    targets: Tensor,
    normalizers: Tensor,
    grad_log_probs: Tensor,
    temperature: float,
    entropies: Tensor | None = None,
    grad_entropies: Tensor | None = None,
) -> Tensor:
    """Compute `gradient` in plain torch, in a tensor of its own.

    d log p_target / d z = onehot - p; d entropy / d z = -p (log p + entropy).
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_softmax = z - normalizers[:, None]
    probabilities = log_softmax.exp()
    result = -probabilities * grad_log_probs[:, None]
    result.scatter_add_(1, targets[:, None], grad_log_probs[:, None])
    if entropies is not None and grad_entropies is not None:
        result -= probabilities * (log_softmax + entropies[:, None]) * grad_entropies[:, None]
    return (result / temperature).to(logits.dtype)

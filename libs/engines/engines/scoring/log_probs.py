"""Log-probs of tokens straight from hidden states: the logits of a chunk of tokens at a time, never all of them.

One pass gives what an objective may read of the softmax at each token: the log-prob of the token itself, the entropy,
and log-probs of K other tokens (given, or the likeliest) with that of all the rest together. Ranks may share the
vocabulary: each has some rows of the head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from engines.execution.executor import Several


class _How(NamedTuple):
    """The settings of a call; `shared` has several ranks or is None, and `first` is the place of this rank's rows."""

    temperature: float
    chunk: int
    entropy: bool
    soft_cap: float | None
    shared: dist.ProcessGroup | None
    first: int
    top_k: int


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int = 4096,
    entropy: bool = False,
    soft_cap: float | None = None,
    group: dist.ProcessGroup | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Return log softmax(hidden @ weight.T / temperature) at the targets, and the entropy of that softmax.

    `hidden` [N, H], `weight` [V, H], `targets` i64[N] -> f32[N] (and f32[N] or None). `soft_cap` c bounds the logits
    before the temperature: c tanh(logits / c). Never more than chunk x V logits are alive, in the backward pass too,
    which computes them again. `group`: ranks with equal `hidden` and `targets`, each with `weight` [v, H], the rows of
    the head from `first` on; results are equal on all of them, and the gradient of `hidden` is the rank's part of a
    sum.
    """
    return several_log_probs(hidden, weight, targets, 0, temperature, chunk, entropy, soft_cap, group, first)[:2]


def several_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    tokens: Tensor | int,
    temperature: float = 1.0,
    chunk: int = 4096,
    entropy: bool = False,
    soft_cap: float | None = None,
    group: dist.ProcessGroup | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor | None, Several]:
    """Return what `token_log_probs` does, and the log-probs of `tokens`, i64[N, K], or of so many likeliest ones."""
    shared = None if group is None or dist.get_world_size(group) == 1 else group
    given, top_k = (tokens, 0) if isinstance(tokens, Tensor) else (targets.new_empty(len(targets), 0), tokens)
    how = _How(temperature, chunk, entropy, soft_cap, shared, first, top_k)
    log_probs, entropies, taken, several, rest = _LogProbs.apply(hidden, weight, targets, given, how)
    return log_probs, entropies if entropy else None, Several(taken, several, rest)


def scored(
    plain: Callable[..., tuple[Tensor, Tensor | None]], heads: tuple[Tensor, Tensor, Tensor], tokens: Tensor | int,
    *args: Any, **options: Any,
) -> tuple[Tensor, Tensor | None, Several | None]:  # fmt: skip
    """Return what `several_log_probs` does of `heads` (hidden, weight, targets); by `plain` where no others are asked
    for."""
    hidden, weight, targets = heads
    if isinstance(tokens, int) and not tokens:
        return (*plain(hidden, weight, targets, *args, **options), None)
    return several_log_probs(hidden, weight, targets, tokens, *args, **options)


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


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, given: Tensor, how: _How
    ) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        count = hidden.shape[0]
        taken = targets.new_empty(count, how.top_k) if how.top_k else given
        results = torch.empty(count, 1 + taken.shape[1], dtype=dtype, device=hidden.device)
        normalizers, entropies, rest = (torch.zeros_like(results[:, 0]) for _ in range(3))
        for rows in _chunks(count, how.chunk):
            logits = _logits(hidden[rows], weight, how)
            if how.top_k:
                taken[rows] = _likeliest(logits, how)
            local, own = _own(torch.cat([targets[rows, None], taken[rows]], 1), weight, how)
            highest = _all(logits.amax(-1), how, dist.ReduceOp.MAX)
            chosen = logits.gather(1, local) * own
            exponentials = torch.exp(logits - highest.unsqueeze(1))
            sums = [exponentials.sum(-1)]
            if how.entropy:
                sums.append((exponentials * logits).sum(-1))
            if taken.shape[1]:
                sums.append(_without(exponentials, local, own).sum(-1))
            sums = [*_all(torch.cat([torch.stack(sums, 1), chosen], 1), how).unbind(1)]
            normalizer = normalizers[rows] = highest + sums[0].log()
            if how.entropy:
                entropies[rows] = normalizer - sums[1] / sums[0]
            if taken.shape[1]:
                rest[rows] = highest + sums[1 + how.entropy].log() - normalizer
            results[rows] = torch.stack(sums[-results.shape[1] :], 1) - normalizer.unsqueeze(1)
        results[:, 1:].masked_fill_(taken < 0, 0)
        ctx.save_for_backward(hidden, weight, targets, taken, normalizers, entropies, rest)
        ctx.how = how
        ctx.mark_non_differentiable(taken)
        return results[:, 0].clone(), entropies, taken.clone(), results[:, 1:].clone(), rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_target: Tensor, by_entropy: Tensor, _: Any, by_several: Tensor, by_rest: Tensor) -> Any:
        hidden, weight, targets, taken, normalizers, entropies, rest = ctx.saved_tensors
        how: _How = ctx.how
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(weight.shape, dtype=normalizers.dtype, device=weight.device)
        by_rest = by_rest.masked_fill(rest.isneginf(), 0)
        by_found = torch.cat([by_target.unsqueeze(1), by_several.masked_fill(taken < 0, 0)], 1)
        for rows in _chunks(hidden.shape[0], how.chunk):
            logits = _logits(hidden[rows], weight, how)
            local, own = _own(torch.cat([targets[rows, None], taken[rows]], 1), weight, how)
            log_softmax = logits - normalizers[rows].unsqueeze(1)
            # d log p_i / d z = onehot_i - p;  d entropy / d z = -p (log p + entropy)
            # d log p_rest / d z = p / p_rest of the rest - p
            grad = torch.exp(log_softmax).mul_(-(by_found[rows].sum(1) + by_rest[rows]).unsqueeze(1))
            if how.entropy:
                inner = log_softmax + entropies[rows].unsqueeze(1)
                grad -= torch.exp(log_softmax) * inner * by_entropy[rows].unsqueeze(1)
            if taken.shape[1]:  # of those beyond the rest p / p_rest may overflow, and is left out
                shares = torch.exp(log_softmax.sub_(rest[rows].unsqueeze(1)).clamp_(max=0))
                grad += _without(shares, local, own).mul_(by_rest[rows].unsqueeze(1))
            grad.scatter_add_(1, local, by_found[rows] * own)
            if how.soft_cap is not None:  # d c tanh(x / c) / dx = 1 - tanh^2
                grad *= 1 - (logits * (how.temperature / how.soft_cap)).square()
            grad = (grad / how.temperature).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[rows]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _logits(hidden: Tensor, weight: Tensor, how: _How) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (logits if how.soft_cap is None else how.soft_cap * torch.tanh(logits / how.soft_cap)) / how.temperature


def _own(tokens: Tensor, weight: Tensor, how: _How) -> tuple[Tensor, Tensor]:
    """Return the rows of this rank's part of the head that tokens have there, and which tokens it has."""
    local = tokens - how.first
    own = (tokens >= 0) & (local >= 0) & (local < weight.shape[0])
    return local.clamp(0, weight.shape[0] - 1), own


def _without(values: Tensor, local: Tensor, own: Tensor) -> Tensor:
    """Return values [n, v], which are overwritten, with 0 at the tokens that are taken, which begin after the first."""
    return values.scatter_reduce_(1, local[:, 1:], (~own[:, 1:]).to(values.dtype), "prod")


def _likeliest(logits: Tensor, how: _How) -> Tensor:
    """Return i64[n, k], the likeliest tokens of the whole vocabulary in order."""
    best, tokens = logits.topk(min(how.top_k, logits.shape[1]), dim=1)
    tokens = tokens + how.first
    if how.shared is not None:
        missing = how.top_k - best.shape[1]
        both = torch.stack([best.double(), tokens.double()])
        both = torch.nn.functional.pad(both, (0, missing), value=-torch.inf)
        every = [torch.empty_like(both) for _ in range(dist.get_world_size(how.shared))]
        dist.all_gather(every, both, group=how.shared)
        values, tokens = torch.cat(every, 2)
        tokens = tokens.gather(1, values.topk(how.top_k, dim=1).indices).long()
    if tokens.shape[1] < how.top_k:
        raise ValueError(f"the {how.top_k} likeliest tokens of a vocabulary of {logits.shape[1]} were asked for")
    return tokens


def _all(values: Tensor, how: _How, op: "dist.ReduceOp.RedOpType" = dist.ReduceOp.SUM) -> Tensor:
    if how.shared is not None:
        dist.all_reduce(values, op=op, group=how.shared)
    return values


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]

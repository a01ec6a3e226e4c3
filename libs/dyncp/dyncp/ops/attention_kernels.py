"""One block of attention with its log-sum-exp, forward and backward, for ring and all-gather attention.

Two versions with one meaning: `plain_*`, the reference in any dtype on any device, and `flash_*` over torch's
variable-length flash attention for half precision on CUDA. out and lse handed to a backward may be those of the whole
row (merged over many blocks): the gradient of a block needs only the row's final normaliser.
"""

import torch

from dyncp.private_api import flash_attention_backward, flash_attention_forward
from dyncp.sharding.layout import Block

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def block_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out [Tq, H, D], lse [H, Tq]) of q [Tq, H, D] over k, v [Tk, Hkv, D], all selected by the block."""
    run = flash_forward if _flash_fits(q) else plain_forward
    return run(q, k, v, block, scale)


def block_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    block: Block,
    scale: float,
) -> Triple:
    """Return (dq, dk, dv) of one block; out [Tq, H, D] and lse [H, Tq] are those of the whole rows."""
    run = flash_backward if _flash_fits(q) else plain_backward
    return run(grad, q, k, v, out, lse, block, scale)


def _flash_fits(q: torch.Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `block_forward` by torch's flash attention."""
    out, lse, *_ = flash_attention_forward(
        q.contiguous(), k.contiguous(), v.contiguous(), block.cu_q, block.cu_k, block.max_q, block.max_k,
        0.0, block.causal, False, scale=scale,
    )  # fmt: skip
    return out, lse


def flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    block: Block,
    scale: float,
) -> Triple:
    """Run `block_backward` by torch's flash attention, which takes the whole rows' out and lse as they are."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    result: Triple = flash_attention_backward(
        grad.contiguous(), q.contiguous(), k.contiguous(), v.contiguous(), out.contiguous(), lse.contiguous(),
        block.cu_q, block.cu_k, block.max_q, block.max_k, 0.0, block.causal, no_dropout, unused, scale=scale,
    )  # fmt: skip
    return result


def plain_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(q k^T scale) v segment by segment, with the log of each row's normaliser."""
    outs, lses = [], []
    for qs, ks, vs in zip(q.split(block.q_lengths), k.split(block.k_lengths), v.split(block.k_lengths), strict=True):
        scores = _scores(qs, ks, block.causal, scale)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        outs.append(torch.einsum("hqk,khd->qhd", weights, _expand(vs, qs).to(weights.dtype)))
        lses.append(lse)
    return torch.cat(outs).to(q.dtype), torch.cat(lses, dim=1)


def plain_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    block: Block,
    scale: float,
) -> Triple:
    """Return the gradient as in the flash attention paper: P = exp(S - lse), dS = P (dP - rowsum(dO O))."""
    dqs, dks, dvs = [], [], []
    pieces = zip(
        grad.split(block.q_lengths), q.split(block.q_lengths), out.split(block.q_lengths),
        lse.split(block.q_lengths, dim=1), k.split(block.k_lengths), v.split(block.k_lengths), strict=True,
    )  # fmt: skip
    for gs, qs, os, ls, ks, vs in pieces:
        weights = (_scores(qs, ks, block.causal, scale) - ls[..., None]).exp()
        gs, os = gs.to(weights.dtype), os.to(weights.dtype)
        d_weights = torch.einsum("qhd,khd->hqk", gs, _expand(vs, qs).to(weights.dtype))
        delta = (gs * os).sum(-1).T[..., None]
        d_scores = weights * (d_weights - delta) * scale
        dqs.append(torch.einsum("hqk,khd->qhd", d_scores, _expand(ks, qs).to(weights.dtype)))
        dks.append(_reduce(torch.einsum("hqk,qhd->khd", d_scores, qs.to(weights.dtype)), ks))
        dvs.append(_reduce(torch.einsum("hqk,qhd->khd", weights, gs), vs))
    return torch.cat(dqs).to(q.dtype), torch.cat(dks).to(k.dtype), torch.cat(dvs).to(v.dtype)


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("qhd,khd->hqk", q.to(dtype), _expand(k, q).to(dtype)) * scale
    if not causal:
        return scores
    rows = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
    return scores.masked_fill(torch.arange(len(k), device=q.device) > rows, float("-inf"))


def _expand(kv: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def _reduce(grad: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return grad.view(len(kv), kv.shape[1], -1, kv.shape[2]).sum(2)

"""The gated delta net over a packed stream cut into contiguous shards: the convolution's halo and the recurrence's scan.

Over the tokens of a shard the recurrence S' = exp(g) (I - beta k k^T) S + beta k v^T is affine in the state it starts from:
S_end = M S_start + S_zero, where S_zero is what the shard gives from an empty state. So each rank hands over one pair (M, S_zero)
a head, whatever its length, and every rank composes the pairs to its left. The arithmetic is seqpack's; M is the same rule run
with zero values from the identity.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dyncp.collectives import gathered, reduce_scattered
from dyncp.layout import Run, Sharding
from dyncp.sizes import Layout
from seqpack.ops.conv import causal_conv1d as local_conv1d
from seqpack.ops.delta_rule import gated_delta_rule as local_delta_rule


def check_delta_layout(layout: str) -> None:
    """ValueError for a layout in which a recurrence cannot be cut."""
    if layout != "contiguous":
        raise ValueError(
            f"a gated delta net runs token after token and cannot be cut in the {layout} layout: use contiguous for the "
            "whole model"
        )


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | Sequence[int] | Sharding,
    group: dist.ProcessGroup | None,
    activation: Any = None,
    layout: Layout = "contiguous",
    backend: str = "auto",
) -> torch.Tensor:
    """Depthwise causal convolution of this rank's shard; the K - 1 tokens before it come from the ranks to its left.

    x: [local tokens, D]; weight: [D, K]; bias: [D] or None; cu_seqlens: boundaries of the whole stream, or its Sharding.
    Returns [local tokens, D]. Collective over `group` (one small all-gather, skipped where no sequence crosses ranks).
    """
    sharding, rank = _sharding_and_rank(cu_seqlens, group, layout, x)
    if group is None or sharding.ring_steps == 1:
        return local_conv1d(x, weight, bias, sharding.local_cu_seqlens(rank, x.device), activation, backend=backend)
    taps = weight.shape[1]
    reach = min(taps - 1, sharding.local_tokens)
    before = min(taps - 1, sharding.runs(rank)[0].start)
    halo = _Halo.apply(x[len(x) - reach :], before, group)
    cu = sharding.local_cu_seqlens(rank, x.device, extra=before)
    return local_conv1d(torch.cat([halo, x]), weight, bias, cu, activation, backend=backend)[before:]


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int] | Sharding,
    group: dist.ProcessGroup | None,
    scale: float | None = None,
    l2norm_qk: bool = True,
    chunk_size: int | None = None,
    layout: Layout = "contiguous",
    backend: str = "auto",
) -> torch.Tensor:
    """The gated delta rule of this rank's shard, exactly as if one rank had run the whole stream. Collective over `group`.

    q, k: [local tokens, Hk, Dk]; v: [local tokens, Hv, Dv]; g (log decay, at most 0), beta: [local tokens, Hv].
    cu_seqlens: boundaries of the whole stream, or its Sharding. Returns [local tokens, Hv, Dv]. Differentiable in q, k, v,
    g and beta. Exchanged: Hv x Dk x (Dk + Dv) numbers a rank, nothing where no sequence crosses ranks.
    """
    sharding, rank = _sharding_and_rank(cu_seqlens, group, layout, q)
    options: dict[str, Any] = {"scale": scale, "l2norm_qk": l2norm_qk, "chunk_size": chunk_size, "backend": backend}
    cu = sharding.local_cu_seqlens(rank, q.device)
    if group is None or sharding.ring_steps == 1:
        return local_delta_rule(q, k, v, g, beta, cu, **options)[0]
    operands = (q, k, v, g, beta)
    pair = _summary(operands, sharding, rank, options)
    start = _scan(pair, operands, sharding, rank, group)
    others = start.new_zeros(len(sharding.runs(rank)) - 1, *start.shape)
    states = torch.cat([start[None], others])
    return local_delta_rule(*operands, cu, initial_state=states, **options)[0]


Operands = tuple[torch.Tensor, ...]


def _sharding_and_rank(
    cu_seqlens: torch.Tensor | Sequence[int] | Sharding,
    group: dist.ProcessGroup | None,
    layout: Layout,
    x: torch.Tensor,
) -> tuple[Sharding, int]:
    check_delta_layout(layout)
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    sharding = Sharding.of(cu_seqlens, size, layout)
    if x.shape[0] != sharding.local_tokens:
        raise ValueError(
            f"each of the {size} ranks holds {sharding.local_tokens} tokens of this stream, got {x.shape[0]}"
        )
    return sharding, rank


def _goes_on(sharding: Sharding, rank: int) -> bool:
    """Whether the last sequence of a rank goes on with the next one."""
    last = sharding.runs(rank)[-1]
    end = sharding.bounds[last.sequence] + last.start + last.length
    return end < sharding.bounds[last.sequence + 1]


def _comes_from_left(run: Run) -> bool:
    return run.start > 0


def _passes_through(sharding: Sharding, rank: int) -> bool:
    """Whether a whole shard is the middle of one sequence: only then does what comes in reach the next rank."""
    runs = sharding.runs(rank)
    return len(runs) == 1 and _comes_from_left(runs[0]) and _goes_on(sharding, rank)


def _summary(operands: Operands, sharding: Sharding, rank: int, options: dict[str, Any]) -> torch.Tensor:
    """[Hv, Dk, Dk + Dv]: (M, S_zero) of the sequence that goes on to the right, zeros where none does."""
    q, k, v, g, beta = operands
    heads, dk, dv = v.shape[1], k.shape[2], v.shape[2]
    wide = torch.promote_types(v.dtype, torch.float32)
    if not _goes_on(sharding, rank):
        return torch.zeros(heads, dk, dk + dv, dtype=wide, device=q.device)
    last = sharding.runs(rank)[-1]
    q, k, v, g, beta = (x[last.offset :] for x in operands)
    cu = torch.tensor([0, last.length], dtype=torch.int32, device=q.device)
    zero_start = local_delta_rule(q, k, v, g, beta, cu, output_final_state=True, **options)[1]
    assert zero_start is not None
    if not _passes_through(sharding, rank):
        return torch.cat([zero_start.new_zeros(heads, dk, dk), zero_start[0]], dim=2)
    identity = torch.eye(dk, dtype=wide, device=q.device).expand(1, heads, dk, dk).contiguous()
    no_values = v.new_zeros(len(v), heads, dk)
    transition = local_delta_rule(
        q, k, no_values, g, beta, cu, initial_state=identity, output_final_state=True, **options
    )[1]
    assert transition is not None
    return torch.cat([transition[0], zero_start[0]], dim=2)


def _scan(
    pair: torch.Tensor, operands: Operands, sharding: Sharding, rank: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """[Hv, Dk, Dv]: the state this rank's first sequence starts from; zeros where it starts here."""
    first = rank
    if _comes_from_left(sharding.runs(rank)[0]):
        first = rank - 1
        while _passes_through(sharding, first):
            first -= 1
    anchor = next((x for x in operands if x.requires_grad), operands[0])
    return _AffineScan.apply(pair, anchor, first, rank, group)


class _AffineScan(torch.autograd.Function):
    """Compose the pairs of ranks first .. rank - 1. Every rank takes part in both collectives, needed or not.

    `anchor` gets no gradient: it makes autograd call the backward on every rank, before it goes on to the operands.
    """

    @staticmethod
    def forward(
        ctx: Any,
        pair: torch.Tensor,
        anchor: torch.Tensor,
        first: int,
        rank: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        pairs = gathered(pair, group).view(-1, *pair.shape)
        dk = pair.shape[1]
        states = [torch.zeros_like(pair[..., dk:])]
        for i in range(first, rank):
            states.append(pairs[i, ..., :dk] @ states[-1] + pairs[i, ..., dk:])
        ctx.save_for_backward(pairs, *states)
        ctx.first, ctx.rank, ctx.group = first, rank, group
        return states[-1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pairs, *states = ctx.saved_tensors
        dk = pairs.shape[2]
        grad, d_pairs = grads[0], torch.zeros_like(pairs)
        for i in reversed(range(ctx.first, ctx.rank)):
            d_pairs[i, ..., dk:] = grad
            d_pairs[i, ..., :dk] = grad @ states[i - ctx.first].transpose(-1, -2)
            grad = pairs[i, ..., :dk].transpose(-1, -2) @ grad
        return reduce_scattered(d_pairs.flatten(0, 1), ctx.group), None, None, None, None


class _Halo(torch.autograd.Function):
    """The last `count` tokens to the left of this rank, out of every rank's last tokens [reach, D]."""

    @staticmethod
    def forward(ctx: Any, tail: torch.Tensor, count: int, group: dist.ProcessGroup) -> torch.Tensor:
        rank = dist.get_rank(group)
        tails = gathered(tail, group)
        ctx.end, ctx.count, ctx.group, ctx.shape = rank * tail.shape[0], count, group, tails.shape
        return tails[ctx.end - count : ctx.end]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        everyone = grads[0].new_zeros(ctx.shape)
        everyone[ctx.end - ctx.count : ctx.end] = grads[0]
        return reduce_scattered(everyone, ctx.group), None, None

"""The gated delta net over a packed stream cut into contiguous shards: the convolution's halo, the recurrence's scan.

Over the tokens of a shard the recurrence S' = exp(g) (I - beta k k^T) S + beta k v^T is affine in the state it starts
from: S_end = M S_start + S_zero and o_t = U_t S_start + o_zero_t, where the zeros are what the shard gives from an
empty state. M and U are the same rule run with zero values from the identity. So:
1. Each rank runs its shard from empty states, without waiting for anybody: o_zero and, for its last sequence, S_zero.
2. For its head, the tokens whose sequence began further left, it also runs the rule from the identity: U and M. Where
   key and value heads are equally wide, both runs are one call (`_zero_and_unit`).
3. It sends one pair (M, S_zero) a head of the model, whatever the length of the shard: zero where its last
   sequence ends with it, M zero where what comes in does not reach its end.
4. It composes the pairs of the ranks on its left, from the one where its sequence begins: S = M S + S_zero.
5. It adds U_t S to the outputs of its head.
6. Backward, the same in reverse (`_Correct`): each rank's gradient of the pairs it used is summed where they came from.

The convolution needs the K - 1 tokens before the shard: one small all-gather of every shard's last tokens (`_Halo`).
Both are skipped where no sequence crosses ranks.

The arithmetic of the rule is seqpack's: both runs are fused kernels where those are installed and fit. Composing and
adding are plain torch, in float32 at least; context parallelism that a kernel package may have itself is not used.

Held by tests: outputs and all gradients equal one process to 1e-10 in float64, for sequences inside a shard, across two
and across all of them (`exactness/matrix_test.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dyncp.comm.collectives import gathered, reduce_scattered
from dyncp.planning.sizes import Layout
from dyncp.sharding.layout import Run, Sharding
from dyncp.sharding.sharding_hash import check_same_sharding
from seqpack.ops.conv import causal_conv1d as local_conv1d
from seqpack.ops.delta_rule import gated_delta_rule as local_delta_rule


def check_delta_layout(layout: str) -> None:
    """Raise ValueError for a layout in which a recurrence cannot be cut."""
    if layout != "contiguous":
        raise ValueError(
            f"a gated delta net runs token after token and cannot be cut in the {layout} layout: use contiguous for "
            "the whole model"
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
    """Convolve this rank's shard, depthwise and causal; the K - 1 tokens before it come from the ranks to its left.

    x: [local tokens, D]; weight: [D, K]; bias: [D] or None; cu_seqlens: boundaries of the whole stream, or its
    Sharding. Returns [local tokens, D]. Collective over `group` (one small all-gather, skipped where no sequence
    crosses ranks).
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
    """Run the gated delta rule on this rank's shard, exactly as on one rank. Collective over `group`.

    q, k: [local tokens, Hk, Dk]; v: [local tokens, Hv, Dv]; g (log decay, at most 0), beta: [local tokens, Hv].
    cu_seqlens: boundaries of the whole stream, or its Sharding. Returns [local tokens, Hv, Dv]. Differentiable in q, k,
    v, g and beta. Exchanged: Hv x Dk x (Dk + Dv) numbers a rank, nothing where no sequence crosses ranks.
    """
    sharding, rank = _sharding_and_rank(cu_seqlens, group, layout, q)
    options: dict[str, Any] = {"scale": scale, "l2norm_qk": l2norm_qk, "chunk_size": chunk_size, "backend": backend}
    operands = (q, k, v, g, beta)
    if group is None or sharding.ring_steps == 1:
        return local_delta_rule(*operands, sharding.local_cu_seqlens(rank, q.device), **options)[0]
    runs = sharding.runs(rank)
    head = runs[0].length if _comes_from_left(runs[0]) else 0
    run_rule = _zero_and_unit if k.shape[2] == v.shape[2] and head else _zero_then_unit
    out, ends, unit, transition = run_rule(operands, sharding, rank, head, options)
    if not _goes_on(sharding, rank):
        pair = ends.new_zeros(v.shape[1], k.shape[2], k.shape[2] + v.shape[2])
    else:
        passed_on = transition if _passes_through(sharding, rank) else torch.zeros_like(transition)
        pair = torch.cat([passed_on, ends[-1]], dim=2)
    first = rank
    if head:
        first = rank - 1
        while _passes_through(sharding, first):
            first -= 1
    result: torch.Tensor = _Correct.apply(out, unit, pair, first, rank, group)
    return result


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _sharding_and_rank(
    cu_seqlens: torch.Tensor | Sequence[int] | Sharding,
    group: dist.ProcessGroup | None,
    layout: Layout,
    x: torch.Tensor,
) -> tuple[Sharding, int]:
    check_delta_layout(layout)
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    sharding = Sharding.of(cu_seqlens, size, layout)
    if group is not None and size > 1:
        check_same_sharding(sharding, group, "gated delta net")
    if x.shape[0] != sharding.local_tokens:
        raise ValueError(
            f"each of the {size} ranks holds {sharding.local_tokens} tokens of this stream, got {x.shape[0]}"
        )
    return sharding, rank


def _goes_on(sharding: Sharding, rank: int) -> bool:
    """Return whether the last sequence of a rank continues on the next one."""
    last = sharding.runs(rank)[-1]
    end = sharding.bounds[last.sequence] + last.start + last.length
    return end < sharding.bounds[last.sequence + 1]


def _comes_from_left(run: Run) -> bool:
    return run.start > 0


def _passes_through(sharding: Sharding, rank: int) -> bool:
    """Return whether a shard is the middle of one sequence: only then does its initial state reach the next rank."""
    runs = sharding.runs(rank)
    return len(runs) == 1 and _comes_from_left(runs[0]) and _goes_on(sharding, rank)


def _zero_and_unit(
    operands: Operands, sharding: Sharding, rank: int, head: int, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the result of `_zero_then_unit` by one call, with the head's tokens appended as one more sequence."""
    q, k, v, g, beta = operands
    again = (q[:head], k[:head], torch.zeros_like(v[:head]), g[:head], beta[:head])
    own = len(q)
    q, k, v, g, beta = (torch.cat(pair) for pair in zip(operands, again, strict=True))
    cu = sharding.local_cu_seqlens(rank, q.device, again=head)
    zeros = _states(len(sharding.runs(rank)), v, k.shape[2], v.shape[2])
    starts = torch.cat([zeros, _identity(v, k.shape[2])])
    out, ends = local_delta_rule(q, k, v, g, beta, cu, initial_state=starts, output_final_state=True, **options)
    assert ends is not None
    return out[:own], ends[:-1], out[own:], ends[-1]


def _zero_then_unit(
    operands: Operands, sharding: Sharding, rank: int, head: int, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (out, ends, unit, transition): outputs and end states of all runs from empty states; then for the head
    (tokens whose sequence began further left) outputs [head, Hv, Dk] and end state M, from identity and zero values."""
    q, k, v, g, beta = operands
    dk = k.shape[2]
    zeros = _states(len(sharding.runs(rank)), v, dk, v.shape[2])
    cu = sharding.local_cu_seqlens(rank, q.device)
    out, ends = local_delta_rule(*operands, cu, initial_state=zeros, output_final_state=True, **options)
    assert ends is not None
    if not head:
        return out, ends, v.new_zeros(0, v.shape[1], dk), _states(1, v, dk, dk)[0]
    cu = torch.tensor([0, head], dtype=torch.int32, device=q.device)
    no_values = v.new_zeros(head, v.shape[1], dk)
    unit, transition = local_delta_rule(
        q[:head], k[:head], no_values, g[:head], beta[:head], cu,
        initial_state=_identity(v, dk), output_final_state=True, **options,
    )  # fmt: skip
    assert transition is not None
    return out, ends, unit, transition[0]


def _states(count: int, v: torch.Tensor, dk: int, dv: int) -> torch.Tensor:
    wide = torch.promote_types(v.dtype, torch.float32)
    return torch.zeros(count, v.shape[1], dk, dv, dtype=wide, device=v.device)


def _identity(v: torch.Tensor, dk: int) -> torch.Tensor:
    wide = torch.promote_types(v.dtype, torch.float32)
    return torch.eye(dk, dtype=wide, device=v.device).expand(1, v.shape[1], dk, dk).contiguous()


class _Correct(torch.autograd.Function):
    """The contribution of the state from the left: out[t] += unit[t] S for the head's tokens.

    S is composed of the pairs of ranks first .. rank - 1. Every rank takes part in both collectives, needed or not:
    `out` passes through, so autograd calls the backward on every rank.
    """

    @staticmethod
    def forward(
        ctx: Any,
        out: torch.Tensor,
        unit: torch.Tensor,
        pair: torch.Tensor,
        first: int,
        rank: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        pairs = gathered(pair, group).view(-1, *pair.shape)
        dk = pair.shape[1]
        states = [torch.zeros_like(pair[..., dk:])]
        for i in range(first, rank):
            states.append(pairs[i, ..., :dk] @ states[-1] + pairs[i, ..., dk:])
        ctx.save_for_backward(unit, pairs, *states)
        ctx.first, ctx.rank, ctx.group = first, rank, group
        if not len(unit):
            return out.clone()
        head = out[: len(unit)] + torch.einsum("thk,hkv->thv", unit.to(pair.dtype), states[-1])
        return torch.cat([head.to(out.dtype), out[len(unit) :]])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        unit, pairs, *states = ctx.saved_tensors
        dk, wide = pairs.shape[2], pairs.dtype
        head = grads[0][: len(unit)].to(wide)
        d_unit = torch.einsum("thv,hkv->thk", head, states[-1]).to(unit.dtype)
        d_state = torch.einsum("thk,thv->hkv", unit.to(wide), head)
        d_pairs = torch.zeros_like(pairs)
        for i in reversed(range(ctx.first, ctx.rank)):
            d_pairs[i, ..., dk:] = d_state
            d_pairs[i, ..., :dk] = d_state @ states[i - ctx.first].transpose(-1, -2)
            d_state = pairs[i, ..., :dk].transpose(-1, -2) @ d_state
        return grads[0], d_unit, reduce_scattered(d_pairs.flatten(0, 1), ctx.group), None, None, None


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

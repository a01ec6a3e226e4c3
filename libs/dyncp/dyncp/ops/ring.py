"""Ring attention: keys and values travel round the group while each rank attends to what it holds at the moment.

As in Ring Attention with Blockwise Transformers (Liu et al. 2023). With n ranks, forward:
1. In step s, rank r holds the keys and values of rank (r - s) mod n; the next ones are already on their way.
2. It attends with its own queries to what they see of these keys (`Sharding.block`; None: nothing), which gives outputs
   and the log-sum-exp of each row's scores.
3. Both are merged into the running ones by online softmax (`_merge`).
4. After `ring_steps` steps every query has seen its whole sequence. In the contiguous layout that is fewer than n where
   no sequence reaches further back.

Backward:
5. The same keys and values travel again. A block's gradient needs the row's final log-sum-exp and output alone.
6. The gradient of a shard of keys and values travels one step behind it: each rank adds its part and sends it on.
7. After the last step the sum goes home, `ring_steps - 1` ranks back.

Held by tests: outputs and all gradients equal one process to 1e-10 in float64, in every layout and group size
(`exactness/matrix_test.py`); the blocks of all steps together are the causal mask, each pair once
(`sharding/layout_test.py`).
"""

from typing import Any

import torch
import torch.distributed as dist

from dyncp.comm.collectives import Shift
from dyncp.ops.attention_kernels import block_backward, block_forward
from dyncp.sharding.layout import Sharding


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sharding: Sharding, group: dist.ProcessGroup, scale: float
) -> torch.Tensor:
    """Return attention over the whole stream, [local, Hq, D]; q [local, Hq, D], k and v [local, Hkv, D]."""
    result: torch.Tensor = _Ring.apply(q, k, v, sharding, group, scale)
    return result


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sharding: Sharding,
        group: dist.ProcessGroup,
        scale: float,
    ) -> torch.Tensor:
        out, lse = _forward(q, torch.stack([k, v]), sharding, group, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.sharding, ctx.group, ctx.scale = sharding, group, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dkv = _backward(grads[0], q, torch.stack([k, v]), out, lse, ctx.sharding, ctx.group, ctx.scale)
        return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype), None, None, None


def _forward(
    q: torch.Tensor, kv: torch.Tensor, sharding: Sharding, group: dist.ProcessGroup, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=wide, device=q.device)
    lse = torch.full((q.shape[0], q.shape[1]), float("-inf"), dtype=wide, device=q.device)
    for step in range(sharding.ring_steps):
        coming = Shift(kv, group) if step + 1 < sharding.ring_steps else None
        block = sharding.block(rank, (rank - step) % size, q.device)
        if block is not None:
            k, v = (block.k.take(x) for x in kv)
            part, part_lse = block_forward(block.q.take(q), k, v, block, scale)
            _merge(out, lse, part, part_lse.T, block.q.start, block.q.length, block.q.index)
        if coming is not None:
            kv = coming.wait()
    return out.to(q.dtype), lse.T.contiguous()


def _merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    start: int,
    length: int,
    index: torch.Tensor | None,
) -> None:
    """Merge by online softmax, in place: rows weighted by exp(their lse - joint lse). out [T, H, D], lse [T, H]."""
    rows = slice(start, start + length) if index is None else index
    old = lse[rows]
    joint = torch.logaddexp(old, part_lse.to(old.dtype))
    weighted = out[rows] * (old - joint).exp()[..., None] + part * (part_lse - joint).exp()[..., None]
    out[rows] = weighted
    lse[rows] = joint


def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sharding: Sharding,
    group: dist.ProcessGroup,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (dq, dkv): the gradient of a shard of keys and values travels behind it, back to its rank at the end."""
    rank, size, steps = dist.get_rank(group), dist.get_world_size(group), sharding.ring_steps
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    travelling: Shift | None = None
    for step in range(steps):
        coming = Shift(kv, group) if step + 1 < steps else None
        dkv = torch.zeros(kv.shape, dtype=wide, device=q.device)
        block = sharding.block(rank, (rank - step) % size, q.device)
        if block is not None:
            k, v = (block.k.take(x) for x in kv)
            rows_lse = block.q.take(lse.T).T
            dq_part, dk, dv = block_backward(
                block.q.take(grad), block.q.take(q), k, v, block.q.take(out), rows_lse, block, scale
            )
            block.q.add_to(dq, dq_part)
            block.k.add_to(dkv[0], dk)
            block.k.add_to(dkv[1], dv)
        if travelling is not None:
            dkv += travelling.wait()
        if coming is not None:
            kv = coming.wait()
            travelling = Shift(dkv, group)
    return dq, dkv if steps == 1 else Shift(dkv, group, by=1 - steps).wait()

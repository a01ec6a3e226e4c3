"""All-gather attention: every rank gathers all keys and values of the stream and attends with its own queries.

Simple and fast where keys are few (grouped-query attention); the gathered keys and values take cp_size times the
memory.
"""

from typing import Any

import torch
import torch.distributed as dist

from dyncp.comm.collectives import all_gather
from dyncp.ops.attention_kernels import block_backward, block_forward
from dyncp.sharding.layout import Block, Sharding


def all_gather_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sharding: Sharding, group: dist.ProcessGroup, scale: float
) -> torch.Tensor:
    """Return attention over the whole stream, [local, Hq, D]; q [local, Hq, D], k and v [local, Hkv, D]."""
    stream = all_gather(torch.stack([k, v], dim=1), group)
    if sharding.gathered_order is not None:
        stream = stream[torch.as_tensor(sharding.gathered_order, device=q.device)]
    blocks = sharding.stream_blocks(dist.get_rank(group), q.device)
    result: torch.Tensor = _StreamAttention.apply(q, stream[:, 0], stream[:, 1], blocks, scale)
    return result


class _StreamAttention(torch.autograd.Function):
    """Local queries over the keys of the stream, block by block; every query is in exactly one block."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: tuple[Block, ...], scale: float
    ) -> torch.Tensor:
        out, lses = torch.zeros_like(q), []
        for block in blocks:
            part, lse = block_forward(block.q.take(q), block.k.take(k), block.k.take(v), block, scale)
            block.q.add_to(out, part)
            lses.append(lse)
        ctx.save_for_backward(q, k, v, out, *lses)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, *lses = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for block, lse in zip(ctx.blocks, lses, strict=True):
            parts = block_backward(
                block.q.take(grads[0]), block.q.take(q), block.k.take(k), block.k.take(v), block.q.take(out), lse,
                block, ctx.scale,
            )  # fmt: skip
            for target, selection, part in zip((dq, dk, dv), (block.q, block.k, block.k), parts, strict=True):
                selection.add_to(target, part)
        return dq, dk, dv, None, None

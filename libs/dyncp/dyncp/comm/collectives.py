"""Collectives that autograd can go through, and the ring's exchange. All over equal shards with tokens first."""

from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 gave these two a new name and warns about the old one; 2.11 has the old one only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gathered(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Gather [n, ...] of each rank -> [size * n, ...] in rank order, without gradient."""
    everyone = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    _all_gather(everyone, x.contiguous(), group=group)
    return everyone


def reduce_scattered(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum [size * n, ...] over ranks -> this rank's [n, ...] of the sum, without gradient."""
    mine = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    _reduce_scatter(mine, x.contiguous(), group=group)
    return mine


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_scattered(grads[0], ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        received = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, grad.contiguous(), group=ctx.group)
        return received, None


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather [n, ...] of each rank -> [cp_size * n, ...] in rank order; the backward sums gradients over ranks."""
    result: torch.Tensor = _AllGather.apply(x, group)
    return result


def all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send row i of x [cp_size, ...] to rank i, and return rows by sender; its own inverse and its own gradient."""
    result: torch.Tensor = _AllToAll.apply(x, group)
    return result


class Shift:
    """A background exchange: one tensor goes `by` ranks to the right of the group, one comes from the left."""

    def __init__(self, x: torch.Tensor, group: dist.ProcessGroup, by: int = 1) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._sent = x.contiguous()
        self._received = torch.empty_like(self._sent)
        to, origin = (dist.get_global_rank(group, (rank + d) % size) for d in (by, -by))
        operations = [
            dist.P2POp(dist.isend, self._sent, to, group=group),
            dist.P2POp(dist.irecv, self._received, origin, group=group),
        ]
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> torch.Tensor:
        """Return the left neighbour's tensor."""
        for work in self._works:
            work.wait()
        return self._received

"""Sums and maxima over ranks in float64, on devices whose collectives know no float64 too."""

import torch
import torch.distributed as dist
from torch import Tensor

NO_FLOAT64 = frozenset({"npu"})
"""Devices whose collectives add up no float64."""


def reduce_float64(values: Tensor, group: dist.ProcessGroup | None = None, largest: bool = False) -> Tensor:
    """Return the sum (or maximum) over ranks of values f64[...], the same on all. Collective.

    HCCL has no float64 sum: there the bits are gathered as integers, and summed in the order of ranks.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return values
    if values.device.type not in NO_FLOAT64:
        values = values.clone()
        dist.all_reduce(values, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        return values
    bits = values.reshape(-1).contiguous().view(torch.int64)
    gathered = bits.new_empty(ranks * bits.numel())
    dist.all_gather_into_tensor(gathered, bits, group=group)
    parts = gathered.view(torch.float64).reshape(ranks, *values.shape)
    return parts.amax(0) if largest else parts.sum(0)

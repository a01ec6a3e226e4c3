"""Ulysses attention: exchange tokens for heads, attend to whole sequences, exchange back (Jacobs et al. 2023).

Keys and values with fewer heads than ranks are repeated, only as often as the ranks need.
"""

import torch
import torch.distributed as dist

from dyncp.comm.collectives import all_to_all
from dyncp.sharding.layout import Sharding


def to_heads(x: torch.Tensor, sharding: Sharding, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange [local tokens, H, D] -> [all tokens in stream order, H / cp_size, D]."""
    size = dist.get_world_size(group)
    tokens, heads, dim = x.shape
    received = all_to_all(x.view(tokens, size, heads // size, dim).transpose(0, 1).contiguous(), group)
    stream = received.view(size * tokens, heads // size, dim)
    order = sharding.gathered_order
    return stream if order is None else stream[torch.as_tensor(order, device=x.device)]


def to_tokens(x: torch.Tensor, sharding: Sharding, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange [all tokens in stream order, H / cp_size, D] -> [local tokens, H, D]: the inverse of `to_heads`."""
    size = dist.get_world_size(group)
    order = sharding.gathered_order
    if order is not None:
        x = x[torch.as_tensor(order.argsort(), device=x.device)]
    total, heads, dim = x.shape
    received = all_to_all(x.view(size, total // size, heads, dim).contiguous(), group)
    return received.transpose(0, 1).reshape(total // size, size * heads, dim)

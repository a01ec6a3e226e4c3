"""The ring in half precision: what is added up over the ranks is added in float32, and rounded once."""

from typing import Any

import torch
import torch.distributed as dist

from dyncp.exactness.processes import run_world
from dyncp.ops.ring import _backward, _forward, ring_attention
from dyncp.sharding.layout import Sharding

RANKS, LOCAL = 4, 8


def gradients() -> dict[str, Any]:
    """One sequence over all ranks in which every query attends to the first key alone.

    That key's value gets 256 from rank 0 and 1 from each other rank, each of which bfloat16 holds, but not their sum.
    """
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    sharding = Sharding.of([0, RANKS * LOCAL], RANKS, "contiguous")
    q = torch.zeros(LOCAL, 1, 8, dtype=torch.bfloat16)
    k, v = torch.zeros_like(q), torch.zeros_like(q)
    q[..., 0] = 100.0
    if rank == 0:
        k[0, 0, 0] = 100.0
    grad = torch.full_like(q, (1.0 if rank else 256.0) / LOCAL)
    out, lse = _forward(q, torch.stack([k, v]), sharding, group, 1.0)
    dq, dkv = _backward(grad, q, torch.stack([k, v]), out, lse, sharding, group, 1.0)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    whole = torch.autograd.grad(ring_attention(q, k, v, sharding, group, 1.0), leaves, grad)
    types = [str(x.dtype) for x in (dq, dkv, *whole)]
    return {"types": types, "dv": dkv[1, :, 0, 0].tolist(), "rounded": whole[2][:, 0, 0].tolist()}


def test_gradients_of_keys_and_values_are_added_in_float32() -> None:
    for rank, found in enumerate(run_world(RANKS, gradients)):
        rest = [0.0] * (LOCAL - 1)
        assert found["types"] == ["torch.float32"] * 2 + ["torch.bfloat16"] * 3
        assert found["dv"] == [0.0 if rank else 259.0, *rest]
        assert found["rounded"] == [0.0 if rank else 260.0, *rest]

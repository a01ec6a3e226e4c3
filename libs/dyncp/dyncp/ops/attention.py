"""Causal attention over a packed stream whose tokens lie on several ranks: one call, three ways to communicate."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dyncp.ops.all_gather import all_gather_attention
from dyncp.ops.ring import ring_attention
from dyncp.ops.ulysses import to_heads, to_tokens
from dyncp.planning.heads import kv_repeats
from dyncp.planning.methods import METHODS, Method
from dyncp.planning.sizes import Layout
from dyncp.sharding.layout import Sharding
from dyncp.sharding.sharding_hash import check_same_sharding
from seqpack.ops.varlen_attention import attention as local_attention


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int] | Sharding,
    group: dist.ProcessGroup | None,
    method: Method = "ring",
    layout: Layout = "contiguous",
    scale: float | None = None,
) -> torch.Tensor:
    """Return each packed sequence's causal attention, exactly as on one rank. Collective over `group`.

    q: [local tokens, Hq, D]; k, v: [local tokens, Hkv, D] with Hq a multiple of Hkv; this rank's shard of the stream.
    cu_seqlens: boundaries of the whole stream (all ranks, padding included), or its Sharding, which saves a copy from
    the device. group: the ranks that share the stream, in order; None for one rank. scale: default D ** -0.5. Returns
    [local tokens, Hq, D]. Differentiable in q, k and v. ValueError for shapes, heads or layouts that do not fit, and on
    every rank for streams that differ between ranks (compared once for each Sharding).
    """
    if method not in METHODS:
        raise ValueError(f"method {method!r} is not known: choose one of {', '.join(METHODS)}")
    size = 1 if group is None else dist.get_world_size(group)
    sharding = Sharding.of(cu_seqlens, size, layout)
    if group is not None and size > 1:
        check_same_sharding(sharding, group, f"attention by {method}")
    if q.shape[0] != sharding.local_tokens or k.shape != v.shape or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"each of the {size} ranks holds {sharding.local_tokens} tokens of this stream; got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2]:
        raise ValueError(f"heads do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if group is None or size == 1:
        return _whole_stream(q, k, v, sharding, scale)
    if method == "ring":
        return ring_attention(q, k, v, sharding, group, scale)
    if method == "all_gather":
        return all_gather_attention(q, k, v, sharding, group, scale)
    repeats = kv_repeats(q.shape[1], k.shape[1], size)
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    heads = [q.shape[1], k.shape[1], v.shape[1]]
    mixed = to_heads(_interleave([q, k, v], size), sharding, group)
    q, k, v = mixed.split([count // size for count in heads], dim=1)
    out = _whole_stream(q, k, v, sharding, scale)
    return to_tokens(out, sharding, group)


def _interleave(tensors: list[torch.Tensor], size: int) -> torch.Tensor:
    """Interleave heads so that an even split over `size` ranks has each tensor's share: one exchange for all."""
    tokens, dim = tensors[0].shape[0], tensors[0].shape[2]
    shares = [x.view(tokens, size, x.shape[1] // size, dim) for x in tensors]
    return torch.cat(shares, dim=2).view(tokens, -1, dim)


def _whole_stream(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sharding: Sharding, scale: float) -> torch.Tensor:
    longest = max(b - a for a, b in zip(sharding.bounds, sharding.bounds[1:], strict=False))
    return local_attention(q, k, v, sharding.cu_seqlens(q.device), scale=scale, max_seqlen=longest)

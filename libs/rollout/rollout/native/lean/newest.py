"""Softmax attention of each row's newest token to all tokens in its slot."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

FUSED_WIDTH = 64
"""Most dimensions of a token's keys, all heads together, for which a row's heads are one product."""
FUSED_ROWS = 32
"""Least number of rows for which they are."""
_EXACT = (torch.float32, torch.float64)
"""Types whose scores are not rounded by it."""
LEAST_SPAN = 16
"""Tokens that a step looks at on a CPU are a multiple of it, those beyond a row's are masked: torch's softmax of fewer
than a vector's numbers goes number by number, which takes twelve times as long, and steps share their views."""


def attend_newest(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return attention of q [n, Hq, D] to keys and values [n, Hkv, span, D]: [n, Hq, D].

    `mask` [n, 1, 1, span] is added to the scores; the first Hq / Hkv queries share the first head of keys, and so on.
    """
    n, kv_heads, _, dim = keys.shape
    if fuses(n, kv_heads * dim, q):
        return _fused(q, keys, values, mask, scale)
    # The query heads that share keys stand as rows of one product: [n, Hkv, Hq / Hkv, D].
    grouped = q.view(n, kv_heads, -1, dim)
    return scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale).flatten(1, 2)


def fuses(rows: int, width: int, like: Tensor) -> bool:
    """Return whether the heads of a row, whose keys have this width together, are one product."""
    return rows >= FUSED_ROWS and width <= FUSED_WIDTH and like.device.type == "cpu" and like.dtype in _EXACT


def _fused(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute one product a row instead of one a head, which saves calls for small heads: each query is zero but for
    its own head's dimensions."""
    n, kv_heads, _, dim = keys.shape
    wide = q.new_zeros(n, kv_heads, q.shape[1] // kv_heads, kv_heads, dim)
    wide.diagonal(dim1=1, dim2=3).copy_(q.view(n, kv_heads, -1, dim).permute(0, 2, 3, 1))
    wide = wide.view(n, -1, kv_heads * dim)
    transposed, seen = keys.transpose(1, 2).flatten(2).transpose(1, 2), values.transpose(1, 2).flatten(2)
    shift = q.new_empty(1, 1, 1) if mask is None else mask.flatten(1, 2)
    scores = torch.baddbmm(shift, wide, transposed, beta=0 if mask is None else 1, alpha=scale)
    o = torch.bmm(scores.softmax(-1), seen).view(n, kv_heads, -1, kv_heads, dim)
    return o.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(n, -1, dim)

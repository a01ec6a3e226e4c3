"""Softmax attention of each row's newest token to all tokens in its slot."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

FUSED_WIDTH = 64
"""Most dimensions of a token's keys, all heads together, for which a row's heads are one product."""
FUSED_ROWS = 32
"""Least number of rows for which they are."""


def attend_newest(q: Tensor, kv: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return attention of q [n, Hq, D] to keys and values kv [n, span, 2, Hkv, D]: [n, Hq, D].

    `mask` [n, 1, 1, span] is added to the scores; the first Hq / Hkv queries share the first head of keys, and so on.
    """
    width = kv.shape[3] * kv.shape[4]
    narrow = width <= FUSED_WIDTH and kv.shape[0] >= FUSED_ROWS
    if narrow and q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64):
        return _fused(q, kv, mask, scale)
    seen = kv.transpose(1, 3)  # [n, Hkv, 2, span, D]
    # The query heads that share keys stand as rows of one product: [n, Hkv, Hq / Hkv, D].
    grouped = q.unflatten(1, (kv.shape[3], -1))
    o = scaled_dot_product_attention(grouped, seen.select(2, 0), seen.select(2, 1), attn_mask=mask, scale=scale)
    return o.flatten(1, 2)


def _fused(q: Tensor, kv: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute one product a row instead of one a head, which saves calls for small heads: each query is zero but for
    its own head's dimensions."""
    n, _, _, kv_heads, dim = kv.shape
    keys, values = kv.flatten(3).unbind(2)  # [n, span, Hkv * D]
    own = torch.eye(kv_heads, dtype=q.dtype).mul_(scale)[:, None, :, None]
    wide = (q.view(n, kv_heads, -1, 1, dim) * own).view(n, -1, kv_heads * dim)
    transposed = keys.transpose(1, 2)
    scores = torch.bmm(wide, transposed) if mask is None else torch.baddbmm(mask.flatten(1, 2), wide, transposed)
    o = torch.bmm(scores.softmax(-1), values).view(n, kv_heads, -1, kv_heads, dim)
    return o.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(n, -1, dim)

"""What a stock attention layer does not tell its attention function: chunks, a scale by the place in a row (Llama 4).

Chunks are in the mask that the decoder builds; the layer has its kind in `config.layer_types`. Queries of Llama 4's
layers without rotary embedding grow with the place in the row, not with `position_ids`: that factor is replaced.
"""

from typing import Any

import torch
from torch import Tensor, nn

from seqpack.adapters.context import PackedContext

_CHUNKED = "chunked_attention"


def chunk_of(module: nn.Module) -> int | None:
    """Return the chunk that a layer attends in; None where it attends to all tokens before."""
    config: Any = getattr(module, "config", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if not isinstance(kinds, list) or not isinstance(layer, int) or layer >= len(kinds) or kinds[layer] != _CHUNKED:
        return None
    chunk: int = config.attention_chunk_size
    return chunk


def scales_queries(module: nn.Module) -> bool:
    """Return whether a layer has scaled its queries by their place in the row."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def query_scale(module: Any, context: PackedContext) -> Tensor:
    """Return f32[T, 1, 1]: the factor that makes a scale by place in the row one by position in the sequence."""
    key = f"query_scale {module.floor_scale} {module.attn_scale}"
    if key not in context.derived:
        edges = context.cu_seqlens.to(torch.int64)
        place = torch.arange(int(edges[-1]), device=edges.device)
        first = edges[:-1].repeat_interleave(edges.diff(), output_size=len(place))
        own, row = (_scale(module, positions) for positions in (place - first, place))
        context.derived[key] = (own / row)[:, None, None]
    factor: Tensor = context.derived[key]
    return factor


def _scale(module: Any, positions: Tensor) -> Tensor:
    """Return the factor of queries at these positions, as Llama4TextAttention computes it."""
    grown = torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale))
    scale: Tensor = grown * module.attn_scale + 1.0
    return scale

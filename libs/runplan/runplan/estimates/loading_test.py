"""The arithmetic of reading is that of the engines on the real module."""

from typing import Any

import pytest

from engines.weights.loading_memory import loading_memory
from runplan.estimates.loading import largest_bytes, share_bytes
from runplan.model.model_shape import ModelShape
from runplan.testing.shape_configs import as_config

SIZES: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "gated_attention": True}
SIZES |= {"full_attention_interval": 2, "linear_key_heads": 2, "linear_value_heads": 4, "linear_head_dim": 16}
DENSE = ModelShape("small", "qwen3_5_text", "", vocab=512, intermediate=96, **SIZES)
EXPERTS: dict[str, Any] = {
    "experts": 8,
    "experts_per_token": 2,
    "expert_intermediate": 48,
    "shared_expert_intermediate": 48,
}
MIXTURE = ModelShape("mixture", "qwen3_5_moe_text", "", vocab=512, **SIZES, **EXPERTS)


@pytest.mark.parametrize("shape", [DENSE, MIXTURE], ids=lambda shape: shape.name)
def test_one_rank_and_four(shape: ModelShape) -> None:
    alone = loading_memory(as_config(shape), 1)
    assert (share_bytes(shape, 1), largest_bytes(shape, 1)) == (alone.share, alone.largest)
    four = loading_memory(as_config(shape), 4)
    # Vectors of few entries are not shared out evenly.
    assert share_bytes(shape, 4) <= four.share < 1.05 * share_bytes(shape, 4)
    assert largest_bytes(shape, 4) == four.largest

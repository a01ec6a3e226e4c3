"""Planned peaks beside those that a GPU's allocator counted: docs/benchmarks/memory_gpu.json and qwen3_vs_trl.json.

Nothing in the plan was fitted to them. Layers are kept, recomputed and compiled; weights sharded and replicated.
"""

from typing import Any

import pytest
from transformers import Qwen3_5TextConfig, Qwen3Config

from engines import EngineConfig
from runplan.estimates.peak_memory import Tokens, fsdp_peak
from runplan.estimates.states import GIB
from runplan.model.model_shape import shape_of

HYBRID: dict[str, Any] = {
    "vocab_size": 65536,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "tie_word_embeddings": True,
}
WIDE: dict[str, Any] = {"vocab_size": 248_320}
DEEP: dict[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
}
QWEN3 = Qwen3Config(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)
SHARDED: dict[str, Any] = {"weights": "sharded"}
PLAIN: dict[str, Any] = {"compile": "off", "weights": "sharded"}
RECOMPUTED: dict[str, Any] = PLAIN | {"gradient_checkpointing": True}


def hybrid(**changes: Any) -> Any:
    return Qwen3_5TextConfig(**{**HYBRID, **changes})


@pytest.mark.parametrize(
    ("config", "settings", "tokens", "several", "measured"),
    [
        (hybrid(), SHARDED, 8192, False, 12.7),
        (hybrid(), {}, 8192, False, 12.5),
        (hybrid(), PLAIN, 8192, False, 24.1),
        (hybrid(), SHARDED | {"moments_dtype": "bfloat16"}, 8192, False, 11.0),
        (hybrid(), SHARDED | {"master_dtype": "bfloat16"}, 8192, False, 8.9),
        (hybrid(**WIDE), {}, 8192, False, 21.4),
        (hybrid(**WIDE), PLAIN, 8192, False, 42.9),
        (hybrid(), PLAIN, 32768, False, 58.7),
        (hybrid(), RECOMPUTED, 32768, False, 17.3),
        (hybrid(**DEEP), RECOMPUTED, 65536, False, 18.4),
        (QWEN3, {"compile": "off"}, 16384, True, 51.2),
    ],
)
def test_within_a_tenth(config: Any, settings: dict[str, Any], tokens: int, several: bool, measured: float) -> None:
    engine = EngineConfig(device="cuda", max_tokens_per_rank=tokens, **settings)
    share = 2 / 3 if several else 0.7  # of the tokens trained
    planned = fsdp_peak(shape_of(config, "x"), engine, 1, Tokens(tokens, int(share * tokens)), 2, several)
    assert planned.bytes / GIB == pytest.approx(measured, rel=0.1)

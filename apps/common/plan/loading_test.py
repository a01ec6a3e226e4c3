"""The arithmetic of reading is that of the engines on the real module."""

import re
from typing import Any

import pytest
from transformers import PretrainedConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from apps.common.plan.loading import largest_bytes, loading_table, share_bytes
from apps.common.plan.model_shape import ModelShape
from apps.grpo.main import main as grpo_main
from apps.grpo.recipes.qwen3_5_27b_fsdp2 import QWEN3_5_27B
from apps.grpo.recipes.qwen3_5_35b_a3b_megatron import QWEN3_5_35B_A3B
from apps.grpo.recipes.qwen3_5_122b_a10b_megatron import QWEN3_5_122B_A10B
from apps.sft.main import main as sft_main
from engines.weights.loading_memory import loading_memory

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


def config(shape: ModelShape) -> PretrainedConfig:
    sizes = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "full_attention_interval": shape.full_attention_interval,
        "linear_num_key_heads": shape.linear_key_heads,
        "linear_num_value_heads": shape.linear_value_heads,
        "linear_key_head_dim": shape.linear_head_dim,
        "linear_value_head_dim": shape.linear_head_dim,
    }
    if not shape.experts:
        return Qwen3_5TextConfig(intermediate_size=shape.intermediate, **sizes)
    return Qwen3_5MoeTextConfig(
        num_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        moe_intermediate_size=shape.expert_intermediate,
        shared_expert_intermediate_size=shape.shared_expert_intermediate,
        **sizes,
    )


@pytest.mark.parametrize("shape", [DENSE, MIXTURE], ids=lambda shape: shape.name)
def test_one_rank_and_four(shape: ModelShape) -> None:
    alone = loading_memory(config(shape), 1)
    assert (share_bytes(shape, 1), largest_bytes(shape, 1)) == (alone.share, alone.largest)
    four = loading_memory(config(shape), 4)
    # Vectors of few entries are not shared out evenly.
    assert share_bytes(shape, 4) <= four.share < 1.05 * share_bytes(shape, 4)
    assert largest_bytes(shape, 4) == four.largest


@pytest.mark.parametrize(
    ("main", "models"),
    [(grpo_main, ["27B", "35B-A3B", "122B-A10B"]), (sft_main, ["397B-A17B"])],
    ids=["grpo", "sft"],
)
def test_the_apps_print_it(main: Any, models: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--loading"])
    assert stop.value.code == 0
    rows = capsys.readouterr().out.splitlines()
    for name in models:
        (row,) = (row for row in rows if row.startswith(f"| Qwen3.5-{name} |"))
        assert len(re.findall(r"[\d.]+ \+ [\d.]+", row)) == 5  # of 1 to 64 ranks


def test_the_table_names_the_models_of_the_recipes() -> None:
    table = loading_table([QWEN3_5_27B, QWEN3_5_35B_A3B, QWEN3_5_122B_A10B, QWEN3_5_27B], ranks=(1, 32))
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| Qwen")]
    assert [row[0].strip("| ") for row in rows] == ["Qwen3.5-122B-A10B", "Qwen3.5-27B", "Qwen3.5-35B-A3B"]
    assert rows[1][1:] == ["26.9", "100", "100.2 + 2.37", "3.1 + 0.07 |"]

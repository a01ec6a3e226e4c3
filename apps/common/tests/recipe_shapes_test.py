"""The recipes' shapes of full size are those of transformers' modules."""

import pytest

from apps.grpo.recipes.qwen3_5_27b_fsdp2 import QWEN3_5_27B
from apps.grpo.recipes.qwen3_5_35b_a3b_megatron import QWEN3_5_35B_A3B
from apps.grpo.recipes.qwen3_5_122b_a10b_megatron import QWEN3_5_122B_A10B
from apps.sft.recipes.qwen3_5_397b_a17b_megatron import QWEN3_5_397B_A17B
from runplan.model.model_shape import ModelShape
from runplan.testing.shape_configs import assert_counted


@pytest.mark.parametrize(
    "shape",
    [QWEN3_5_27B, QWEN3_5_35B_A3B, QWEN3_5_122B_A10B, QWEN3_5_397B_A17B],
    ids=lambda shape: shape.name,
)
def test_a_tower_and_its_decoder_are_counted_as_in_the_real_module(shape: ModelShape) -> None:
    assert_counted(shape)

"""Which measured row a run's time is reckoned by; that rows are what was measured is `step_time_test`."""

from typing import Any

import pytest

from engines import EngineConfig, LoraConfig
from engines.tiny import tiny_config
from runplan.estimates.rates import (
    COMPILED,
    COMPILED_SHARDED,
    EXPERTS,
    FUSED,
    MEGATRON,
    PLAIN,
    Rate,
    not_measured,
    rate_of,
)
from runplan.model.model_shape import ModelShape, shape_of

HEADS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
DENSE, MIXED = (shape_of(tiny_config(kind, **HEADS), kind) for kind in ("dense", "moe"))
ATTENTION = shape_of(tiny_config("attention"), "attention")


@pytest.mark.parametrize(
    ("shape", "settings", "ranks", "rate", "apart"),
    [
        (DENSE, {}, 1, COMPILED, []),
        (DENSE, {"weights": "sharded"}, 1, COMPILED_SHARDED, []),
        (DENSE, {}, 2, COMPILED_SHARDED, []),
        (DENSE, {"weights": "replicated"}, 2, COMPILED, []),
        (DENSE, {"compile": "off"}, 1, PLAIN, []),
        (DENSE, {"vision": "trained"}, 1, PLAIN, []),
        (DENSE, {"dtype": "float32"}, 1, PLAIN, ["float32"]),
        (MIXED, {}, 1, EXPERTS, []),
        (MIXED, {"backend": "megatron"}, 1, EXPERTS, ["experts under Megatron"]),
        (ATTENTION, {}, 8, COMPILED_SHARDED, ["attention alone"]),
        (ATTENTION, {"compile": "off"}, 8, PLAIN, ["attention alone"]),
        (DENSE, {"backend": "megatron"}, 1, FUSED, []),
        (DENSE, {"backend": "megatron", "tensor_parallel": 2}, 2, FUSED, []),
        (DENSE, {"backend": "megatron", "compile": "off"}, 1, MEGATRON, []),
        (DENSE, {"backend": "megatron", "lora": LoraConfig(rank=4)}, 1, MEGATRON, []),
        (ATTENTION, {"backend": "megatron"}, 1, MEGATRON, ["attention alone"]),
        (DENSE, {"backend": "megatron", "vision": "frozen"}, 1, MEGATRON, []),
    ],
)
def test_a_run_has_the_row_that_computes_as_it_does(
    shape: ModelShape, settings: dict[str, Any], ranks: int, rate: Rate, apart: list[str]
) -> None:
    engine = EngineConfig(device="cuda", **settings)
    assert rate_of(shape, engine, ranks) is rate
    assert not_measured(shape, engine) == apart

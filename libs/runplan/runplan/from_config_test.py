"""Memory and time from two configs are what a plan of the same run says."""

from typing import Any

import pytest
from transformers import Qwen3_5TextConfig

from engines import EngineConfig
from runplan import Origin, PlainCluster, RunSpec, make_plan, memory, shape_of, step_time

MODEL = Qwen3_5TextConfig()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shard_ranks": 4},
        {"backend": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2},
        {"context_parallel": "dynamic"},
    ],
)
def test_they_are_the_plans(settings: dict[str, Any]) -> None:
    engine = EngineConfig(device="cuda", gradient_checkpointing=True, **settings)
    origin = Origin("a script", shape_of(MODEL, "model"), "rows")
    spec = RunSpec("sft", "any", engine, PlainCluster(), 8, steps=1, rows=512, longest=4096, origin=origin)
    sections = make_plan(spec).sections
    peak = memory(engine, MODEL, ranks=8)
    assert sections["Memory"][-1] == f"{peak.bytes / 2**30:.1f} GiB at the fullest moment of a step ({peak.when})"
    seconds = step_time(engine, MODEL, sequences=512, length=4096, ranks=8)
    assert sections["Time"][0].startswith(f"{seconds:.0f} s of training's arithmetic a step")


def test_what_does_not_divide_or_was_not_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks are no multiple"):
        memory(EngineConfig(backend="megatron", tensor_parallel=2), MODEL, ranks=3)
    with pytest.raises(ValueError, match="layers do not divide over 5 stages"):
        memory(EngineConfig(backend="megatron", pipeline_parallel=5), MODEL, ranks=5)
    with pytest.raises(ValueError, match="no step was measured on device 'npu'"):
        step_time(EngineConfig(device="npu"), MODEL, sequences=1, length=1)
    with pytest.raises(ValueError, match="does not fit a micro-batch"):
        step_time(EngineConfig(device="cuda"), MODEL, sequences=1, length=10**6)

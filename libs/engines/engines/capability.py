"""Capabilities as code: Yes with the test that showed it, or No with the reason, before any device is touched."""

from dataclasses import dataclass

from engines.config import EngineConfig


@dataclass(frozen=True)
class Yes:
    """Supported; `evidence` names the test that showed it, as FILE::FUNCTION under this package."""

    evidence: str

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True)
class No:
    """Not supported, and why."""

    reason: str

    def __bool__(self) -> bool:
        return False


FSDP2: dict[str, Yes | No] = {
    "packed": Yes("step_executors_test.py::test_packed_equals_padded_in_any_micro_batches"),
    "padded": Yes("step_executors_test.py::test_packed_equals_padded_in_any_micro_batches"),
    "cpu": Yes("step_executors_test.py::test_steps_equal_a_plain_loop"),
    "cuda": Yes("cuda_test.py::test_float32_equals_the_cpu"),
    "npu": No("no Ascend device was at hand: nothing ran on one yet"),
    "data_parallel": Yes("step_two_test.py::test_same_curve"),
    "context_parallel": Yes("parallel/context_parallel_test.py::test_same_curves_scores_and_weights"),
    "tensor_parallel": No("FSDP2 shards over data-parallel ranks alone"),
    "pipeline_parallel": No("FSDP2 shards over data-parallel ranks alone"),
    "moe": Yes("families/router_test.py::test_one_step_equals_transformers_on_the_whole_batch"),
    "router_loss": Yes("families/router_test.py::test_two_ranks_equal_one"),
    "expert_parallel": No("experts are sharded like other weights, not placed"),
    "bfloat16": Yes("step_executors_test.py::test_bfloat16_compute_with_float32_weights"),
    "gradient_checkpointing": Yes("step_executors_test.py::test_gradient_checkpointing_recomputes_the_layers"),
    "tied_weights": Yes("storage/checkpoint_test.py::test_resume_is_bitwise"),
    "offload": Yes("step_executors_test.py::test_offload_and_onload"),
    "own_rows": Yes("step_two_test.py::test_ranks_that_hold_their_own_rows_give_the_whole_batchs_steps"),
    "dropout": No("the model is trained as it is scored: no dropout, whatever its config says"),
    "lora": No("adapters are not implemented yet"),
    "async_save": No("save() waits for the disk"),
    "vision": No("text models only: batches with images are refused"),
    "multi_axis_positions": Yes("packing/model_test.py::test_multi_axis_positions_reach_the_rotary_embedding"),
}


def supports(config: EngineConfig, feature: str) -> Yes | No:
    """Whether an engine of this configuration has the feature. ValueError lists the features for an unknown name."""
    if feature == "megatron":
        return No("the megatron backend is not implemented yet; use backend='fsdp2'")
    if feature == "fsdp2":
        return FSDP2["cpu"]
    if feature not in FSDP2:
        raise ValueError(f"unknown feature {feature!r}; known are {', '.join(sorted([*FSDP2, 'fsdp2', 'megatron']))}")
    if config.backend == "megatron":
        return No("the megatron backend is not implemented yet; use backend='fsdp2'")
    return FSDP2[feature]


def refuse_unsupported(config: EngineConfig) -> None:
    """ValueError with the reason for the first thing this configuration asks for that is not there."""
    asked = {config.backend: True, config.batching: True, "npu": config.device == "npu"}
    asked["context_parallel"] = config.context_parallel not in ("off", "static:1")
    for feature, wanted in asked.items():
        answer = supports(config, feature)
        if wanted and isinstance(answer, No):
            raise ValueError(f"{feature} is not supported: {answer.reason}")
    if asked["context_parallel"] and config.batching != "packed":
        raise ValueError("context parallelism shards packed sequences: set batching='packed'")

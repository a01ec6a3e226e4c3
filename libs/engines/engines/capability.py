"""Capabilities as code: Yes with what showed it, or No with the reason, before any device is touched."""

from dataclasses import dataclass

from engines.config import EngineConfig


@dataclass(frozen=True)
class Yes:
    """Supported; `evidence` names the test that ran it."""

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
    "packed": Yes("step_test: packed equals padded, loss and gradients"),
    "padded": Yes("step_test: packed equals padded, loss and gradients"),
    "cpu": Yes("step_test"),
    "cuda": Yes("cuda_test on an H200, cuda_four_test on four"),
    "npu": No("no Ascend device was at hand: nothing ran on one yet"),
    "data_parallel": Yes("step_two_test: two processes equal one"),
    "context_parallel": Yes("context_parallel_test: static and dynamic equal one process, on 2 and 4 ranks"),
    "tensor_parallel": No("FSDP2 shards over data-parallel ranks alone"),
    "pipeline_parallel": No("FSDP2 shards over data-parallel ranks alone"),
    "moe": Yes("packing/model_test: Qwen3.5 MoE is isolated when packed"),
    "expert_parallel": No("experts are sharded like other weights, not placed"),
    "bfloat16": Yes("step_test: a bfloat16 step"),
    "gradient_checkpointing": Yes("step_test: same gradients"),
    "tied_weights": Yes("checkpoint_test: save, load and save_hf with tied weights"),
    "offload": Yes("step_test: offload and onload"),
    "lora": No("adapters are not implemented yet"),
    "async_save": No("save() waits for the disk"),
    "vision": No("text models only: batches with images are refused"),
    "multi_axis_positions": Yes("packing/model_test: MRoPE positions of a batch reach the rotary embedding"),
}


def supports(config: EngineConfig, feature: str) -> Yes | No:
    """Whether an engine of this configuration has the feature. ValueError lists the features for an unknown name."""
    if feature == "megatron":
        return No("the megatron backend is not implemented yet; use backend='fsdp2'")
    if feature == "fsdp2":
        return Yes("step_test")
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

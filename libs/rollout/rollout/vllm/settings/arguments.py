"""Checks of vLLM's engine arguments: those that are set elsewhere or that vLLM lacks are refused."""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

OWNED = {
    "aux_output_config": "use RolloutConfig.routed_experts",
    "disable_log_stats": "the engine has counts of its own",
    "distributed_executor_backend": "VllmConfig.tensor_parallel says how many processes share a model",
    "compilation_config": "use VllmConfig.graph_sizes",
    "cudagraph_capture_sizes": "use VllmConfig.graph_sizes",
    "data_parallel_size": "use VllmConfig.data_parallel",
    "dtype": "use VllmConfig.dtype",
    "enable_chunked_prefill": "use VllmConfig.split_prompts",
    "enable_expert_parallel": "use VllmConfig.expert_parallel",
    "enable_return_routed_experts": "use RolloutConfig.routed_experts",
    "enable_sleep_mode": "use VllmConfig.sleep",
    "enable_prefix_caching": "use VllmConfig.prefix_cache",
    "gpu_memory_utilization": "use VllmConfig.memory_share",
    "hf_overrides": "the head gets weights of its own there, which a transfer then replaces for certain",
    "load_format": "the engine hands the weights over itself",
    "logprobs_mode": "log-probs are those of the distribution that was sampled from",
    "master_addr": "use VllmConfig.nodes",
    "master_port": "use VllmConfig.nodes",
    "max_logprobs": "the sampled token's is told, and no other",
    "max_model_len": "use RolloutConfig.max_length",
    "max_num_batched_tokens": "use RolloutConfig.prefill_tokens",
    "max_num_seqs": "use RolloutConfig.max_batch",
    "mm_device_do_normalize": "patches come as the tower reads them",
    "mm_processor_cache_gb": "images come as patches, which vLLM's processors never see",
    "nnodes": "use VllmConfig.nodes",
    "node_rank": "use VllmConfig.nodes",
    "model": "the engine is given its directory",
    "pipeline_parallel_size": "use VllmConfig.pipeline_parallel",
    "seed": "use RolloutConfig.seed",
    "skip_mm_profiling": "images come as patches, which vLLM's processors never see",
    "skip_tokenizer_init": "use RolloutConfig.tokenizer",
    "structured_outputs_config": "llguidance masks tokens there as in the native engine",
    "tensor_parallel_size": "use VllmConfig.tensor_parallel",
    "tokenizer": "use RolloutConfig.tokenizer",
    "worker_extension_cls": "it takes the weights",
}
"""Engine arguments that are not passed through, and why or where they are set instead."""


KEPT = {
    "quantization": "weights",
    "kv_cache_dtype": "cache",
    "mamba_cache_dtype": "cache",
    "mamba_ssm_cache_dtype": "cache",
}
"""Engine arguments that keep weights or caches in a dtype of their own. All others that change numbers change the order
of sums, or should."""


class EngineArguments(NamedTuple):
    """A vLLM's version and the names of its engine arguments."""

    version: str
    names: tuple[str, ...]


def check_arguments(arguments: Iterable[str], known: EngineArguments) -> None:
    """Raise ValueError with an argument that this vLLM lacks, and similar names."""
    for name in arguments:
        if name not in known.names:
            raise ValueError(f"vLLM {known.version} has no engine argument {name!r}{_like(name, known.names)}")


def numeric_arguments(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments as NAME=VALUE, each with its kind: "weights" or "cache" are kept in fewer bits; "rounding"
    is all others."""
    return {
        f"{name}={value if isinstance(value, str) else json.dumps(value)}": "rounding"
        if value in (None, "auto")
        else KEPT.get(name, "rounding")
        for name, value in arguments.items()
    }


def _like(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, [name for name in names if name not in OWNED], n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""

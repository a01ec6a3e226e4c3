"""Engine arguments of vLLM from the command line: those that the project sets have flags of their own."""

from collections.abc import Sequence
from typing import Any

from apps.common.cluster import VLLM_FLAG
from apps.common.named_values import named_values
from rollout.vllm.settings.arguments import OWNED

INSTEAD = {
    "aux_output_config": "use --trainer.routing-replay",
    "compilation_config": "use --rollout.cuda-graph-sizes",
    "cudagraph_capture_sizes": "use --rollout.cuda-graph-sizes",
    "data_parallel_size": "use --rollout.data-parallel",
    "dtype": "use --rollout.dtype",
    "distributed_executor_backend": "use --rollout.tensor-parallel",
    "enable_chunked_prefill": "use --rollout.chunked-prefill",
    "enable_expert_parallel": "use --rollout.expert-parallel",
    "enable_prefix_caching": "use --rollout.prefix-cache",
    "enable_return_routed_experts": "use --trainer.routing-replay",
    "enable_sleep_mode": "use --rollout.sleep",
    "gpu_memory_utilization": "use --rollout.gpu-memory-utilization",
    **dict.fromkeys(("master_addr", "master_port", "nnodes", "node_rank"), "use --rollout.ray-nodes"),
    "max_model_len": "use --rollout.max-model-tokens",
    "max_num_batched_tokens": "use --rollout.max-batched-tokens",
    "max_num_seqs": "use --rollout.max-requests",
    "model": "use --model",
    "seed": "use --seed",
    "skip_tokenizer_init": "tokens come in and go out",
    "pipeline_parallel_size": "use --rollout.pipeline-parallel",
    "tensor_parallel_size": "use --rollout.tensor-parallel",
    "tokenizer": "tokens come in and go out",
}
"""What stands for an engine argument here; for others the reason of `rollout.vllm.settings.arguments.OWNED` holds."""


def vllm_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE words as vLLM's engine arguments by name; a value that is JSON is read as such.

    Raises:
        ValueError: a word has another shape, a name comes twice, or the project sets it; the text has the flag.
    """
    arguments = named_values(VLLM_FLAG, words, "block_size=32")
    reasons = OWNED | INSTEAD
    for name in arguments:
        if name in reasons:
            raise ValueError(f"{VLLM_FLAG} can't hold {name}: {reasons[name]}")
    return arguments

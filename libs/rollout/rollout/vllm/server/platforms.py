"""Engine arguments and variables of vLLM on each kind of device. Imports nothing of vLLM."""

from collections.abc import Mapping
from typing import Any

from rollout.vllm.server import cpu_replicas as cpu_copies
from rollout.vllm.server.ascend import ascend_arguments
from rollout.vllm.settings.config import decode_graphs

GRAPHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Batch sizes of graphs up to the most requests: a step is filled up to the next one, by half at most."""
SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"


def settle(
    platform: str,
    arguments: Mapping[str, Any],
    environ: Mapping[str, str],
    together: Mapping[str, int] | None,
    ascend: str | None,
    flashinfer: bool = True,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return vLLM's engine arguments for `platform` ("cpu", "cuda", "npu", ...), and the variables to set with them.

    `together`: which of several copies this is that share experts, on a CPU alone; `ascend`: the version of vllm-ascend
    that is installed; `flashinfer`: whether FlashInfer is, which vLLM on CUDA takes for delta nets and for sampling.

    Raises ValueError for settings of an accelerator on a CPU, and on NPUs as `ascend_arguments` does.
    """
    if platform == "cuda":
        return cuda_arguments(arguments, environ, flashinfer)
    arguments = {"enforce_eager": True, "async_scheduling": False, **arguments}
    if platform == "cpu":
        _refuse_accelerator_arguments(arguments)
        return dict(arguments), {} if together is None else cpu_copies.variables(together)
    if platform == "npu":
        return ascend_arguments(arguments, environ, ascend)
    return dict(arguments), {}


def cuda_arguments(
    arguments: Mapping[str, Any], environ: Mapping[str, str], flashinfer: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the engine arguments for CUDA with what they leave open, and the variables to set with them.

    `async_scheduling`, by which vLLM prepares a step while the device computes the one before, is on where it sleeps:
    weights are then replaced while nothing runs. Elsewhere it has to be asked for.
    """
    filled = dict(arguments)
    if not filled.get("enable_sleep_mode"):
        filled.setdefault("async_scheduling", False)
    if "enforce_eager" not in filled:
        most = filled["max_num_seqs"]
        filled |= decode_graphs([*(size for size in GRAPHS if size < most), most])
    if flashinfer:
        return filled, {}
    filled["additional_config"] = {"gdn_prefill_backend": "triton"} | (filled.get("additional_config") or {})
    return filled, {} if SAMPLER in environ else {SAMPLER: "0"}


def _refuse_accelerator_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for settings of an accelerator, where vLLM runs on a CPU."""
    if "gpu_memory_utilization" in arguments:
        raise ValueError("memory_share is of an accelerator's memory and this vLLM runs on a CPU: use kv_cache_gib")
    if not arguments["enforce_eager"]:
        raise ValueError(
            "graph_sizes and enforce_eager=false are of CUDA graphs and this vLLM runs on a CPU: leave them out"
        )

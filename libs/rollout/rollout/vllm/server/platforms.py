"""Engine arguments and variables of vLLM on each kind of device. Imports nothing of vLLM."""

from collections.abc import Mapping
from typing import Any

from rollout.vllm.server import cpu_replicas as cpu_copies
from rollout.vllm.server.ascend import ascend_arguments


def settle(
    platform: str,
    arguments: Mapping[str, Any],
    environ: Mapping[str, str],
    together: Mapping[str, int] | None,
    ascend: str | None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return vLLM's engine arguments for `platform` ("cpu", "cuda", "npu", ...), and the variables to set with them.

    `together`: which of several copies this is that share experts, on a CPU alone; `ascend`: the version of vllm-ascend
    that is installed.

    Raises ValueError for settings of an accelerator on a CPU, and on NPUs as `ascend_arguments` does.
    """
    if platform == "cpu":
        _refuse_accelerator_arguments(arguments)
        return dict(arguments), {} if together is None else cpu_copies.variables(together)
    if platform == "npu":
        return ascend_arguments(arguments, environ, ascend)
    return dict(arguments), {}


def _refuse_accelerator_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for settings of an accelerator, where vLLM runs on a CPU."""
    if "gpu_memory_utilization" in arguments:
        raise ValueError("memory_share is of an accelerator's memory and this vLLM runs on a CPU: use kv_cache_gib")
    if not arguments["enforce_eager"]:
        raise ValueError(
            "graph_sizes and enforce_eager=false are of CUDA graphs and this vLLM runs on a CPU: leave them out"
        )

"""Limits of several vLLM workers, from a model's config, before anything is loaded."""

from collections.abc import Mapping
from typing import Any

EXPERT_ROWS = 32
"""Rows of a worker's part of each expert on a CPU, or a multiple: vLLM pads others, and then takes no new weights."""
HEADS = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")


def spread_refusal(config: Mapping[str, Any], workers: int, by_experts: bool, cpu: bool, copies: int = 1) -> str | None:
    """Return why a model of this config (its text part) can't be split over so many workers; None where it can.

    `by_experts`: each worker has whole experts instead of a part of every one. `copies`: number of copies of the model,
    over whose workers its experts are spread.
    """
    experts = config.get("num_experts") or config.get("num_local_experts") or 0  # Qwen3's is saved by its newer name
    if by_experts and not experts:
        return "the model has no experts: leave expert_parallel off"
    for name in HEADS:
        heads = config.get(name)
        if heads is not None and heads % workers:
            return f"{name} {heads} can't be shared by {workers} workers (tensor_parallel): use a divisor of it"
    tower = (config.get("vision_config") or {}).get("num_heads")
    if tower is not None and tower % workers:
        return f"num_heads {tower} of its tower can't be shared by {workers} workers (tensor_parallel): use a divisor"
    shared = config.get("num_key_value_heads")
    if shared is not None and shared % workers and workers % shared:
        return f"num_key_value_heads {shared} can be neither shared nor copied by {workers} workers (tensor_parallel)"
    if experts and by_experts and experts % (workers * copies):
        named = "tensor_parallel" if copies == 1 else "tensor_parallel x data_parallel"
        return f"{experts} experts can't be shared by {workers * copies} workers: use a divisor of it for {named}"
    if experts and not by_experts and workers > 1:
        rows = config["moe_intermediate_size"]
        if rows % workers or (cpu and rows // workers % EXPERT_ROWS):
            each = f" {EXPERT_ROWS} rows or a multiple of it each, on a CPU" if cpu else " equal parts"
            return f"moe_intermediate_size {rows} can't be cut for {workers} workers into{each}: use expert_parallel"
    return None

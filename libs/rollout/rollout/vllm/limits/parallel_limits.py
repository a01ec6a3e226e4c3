"""Limits of several vLLM workers, from a model's config, before anything is loaded."""

from collections.abc import Mapping
from typing import Any

EXPERT_ROWS = 32
"""Rows of a worker's part of each expert on a CPU, or a multiple: vLLM pads others, and then takes no new weights."""
HEADS = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")


def stages_refusal(config: Mapping[str, Any], stages: int, cpu: bool, sees: bool) -> str | None:
    """Return why the layers of a model of this config (its text part) can't be split into so many stages; None where
    they can. `sees`: whether it reads images."""
    if stages == 1:
        return None
    if not cpu:
        return (
            "stages of a model (pipeline_parallel) ran on a CPU alone, no accelerator has run them: use tensor_parallel"
        )
    if sees:
        return "stages of a model (pipeline_parallel) never ran with images: use tensor_parallel"
    layers = config["num_hidden_layers"]
    return f"{layers} layers can't fill {stages} stages (pipeline_parallel): lower it" if layers < stages else None


def nodes_refusal(workers: int, nodes: int, cpu: bool) -> str | None:
    """Return why a copy's workers can't be spread over so many machines; None where they can. On a CPU vLLM 0.32 takes
    each worker for a machine of its own, and has no queue for the answers of a second one on the first machine."""
    if not cpu or nodes == 1 or workers == nodes:
        return None
    told = f"{workers} workers over {nodes} machines"
    return f"{told}: on a CPU vLLM can have one on each (tensor_parallel x pipeline_parallel)"


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

"""The layout of ranks that a configuration asks for, whatever the backend."""

from engines.config import EngineConfig, parse_context_parallel
from engines.parallel.layout import ParallelLayout


def layout_of(config: EngineConfig, world_size: int) -> ParallelLayout:
    """Return the layout of this many ranks. ValueError where the configuration's sizes do not divide them."""
    shards_of(config, world_size)
    size = parse_context_parallel(config.context_parallel)
    shared = {
        "tp": config.tensor_parallel,
        "pp": config.pipeline_parallel,
        "ep": config.expert_parallel,
        "etp": config.expert_tensor_parallel,
    }
    if size == "dynamic":  # groups change from step to step: the plan says who shares what
        return ParallelLayout.of_world(world_size, **shared)
    if world_size % size:
        raise ValueError(
            f"context_parallel='static:{size}' needs a multiple of {size} ranks, this run has {world_size}: start "
            "another number of processes, or use 'dynamic'"
        )
    return ParallelLayout.of_world(world_size, cp=size, **shared)


def shards_of(config: EngineConfig, world_size: int) -> int:
    """Return how many ranks share a copy of sharded weights. ValueError where that does not divide all ranks."""
    shards = config.shard_ranks or world_size
    if world_size % shards:
        raise ValueError(
            f"shard_ranks={shards} does not divide the {world_size} ranks of this run: choose a divisor, or start "
            "another number of processes"
        )
    return shards

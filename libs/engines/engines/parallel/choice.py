"""Which layout, planner and inputs a configuration asks for; every backend of transformers models asks here."""

from typing import Any

from engines.config import EngineConfig, parse_context_parallel
from engines.execution.inputs import InputBuilder, PackedInputs, PaddedInputs
from engines.media.settings import VisionSettings
from engines.parallel.context_parallel import ContextParallel, ContextParallelPlanner, ShardedInputs
from engines.parallel.groups import ParallelGroups
from engines.parallel.layout import ParallelLayout
from engines.parallel.planning import DataParallelPlanner, Planner


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


def planner_and_inputs(config: EngineConfig, model_config: Any, groups: ParallelGroups) -> tuple[Planner, InputBuilder]:
    """Return who plans the steps of transformers models, and how micro-batches enter them."""
    vision = None if config.vision == "off" else VisionSettings.of(model_config)
    if config.context_parallel in ("off", "static:1"):
        planner = DataParallelPlanner(config.max_tokens_per_rank, groups.layout.plan_size)
        kind = PackedInputs if config.batching == "packed" else PaddedInputs
        return planner, kind(vision=vision, replay=config.routing_replay)
    shared = ContextParallel.of(config, model_config, groups.layout.plan_size)
    return ContextParallelPlanner(shared, groups), ShardedInputs(
        plan_index=groups.plan_index,
        layout=shared.layout,
        method=shared.method,
        tensor_parallel=shared.tensor_parallel,
        vision=vision,
        replay=config.routing_replay,
    )

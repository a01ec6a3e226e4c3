"""The planner and the inputs that a configuration asks for, for every backend of transformers models."""

from typing import Any

from engines.config import EngineConfig
from engines.inputs.context_parallel import ContextParallel, ContextParallelPlanner, ShardedInputs
from engines.inputs.model_inputs import InputBuilder, PackedInputs, PaddedInputs
from engines.media.vision_settings import VisionSettings
from engines.mtp.head import trains_head
from engines.parallel.groups import ParallelGroups
from engines.parallel.planning import DataParallelPlanner, Planner


def planner_and_inputs(config: EngineConfig, model_config: Any, groups: ParallelGroups) -> tuple[Planner, InputBuilder]:
    """Return the planner of steps of transformers models, and the builder of their inputs."""
    vision = None if config.vision == "off" else VisionSettings.of(model_config)
    if config.context_parallel in ("off", "static:1"):
        planner = DataParallelPlanner(config.max_tokens_per_rank, groups.layout.plan_size)
        kind = PackedInputs if config.batching == "packed" else PaddedInputs
        return planner, kind(vision=vision, replay=config.routing_replay, mtp=trains_head(config))
    shared = ContextParallel.of(config, model_config, groups.layout.plan_size)
    return ContextParallelPlanner(shared, groups), ShardedInputs(
        plan_index=groups.plan_index,
        layout=shared.layout,
        method=shared.method,
        tensor_parallel=shared.tensor_parallel,
        vision=vision,
        replay=config.routing_replay,
        mtp=trains_head(config),
    )

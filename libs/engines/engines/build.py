"""Build an engine."""

from typing import Any

import torch.distributed as dist

from engines.capability import refuse_unsupported
from engines.config import EngineConfig, parse_context_parallel
from engines.execution.inputs import InputBuilder, PackedInputs, PaddedInputs
from engines.fsdp2.executor import FSDP2Executor
from engines.launch import ensure_group
from engines.loading import load, resolve_device
from engines.parallel.context_parallel import ContextParallel, ContextParallelPlanner, ShardedInputs
from engines.parallel.groups import ParallelGroups
from engines.parallel.layout import ParallelLayout
from engines.parallel.planning import DataParallelPlanner, Planner
from engines.protocol import TrainEngine
from engines.step import Engine


def build_engine(config: EngineConfig, model: Any = None, trainable: bool = True) -> TrainEngine:
    """Build an engine over all ranks of the current process group; a group of one is made where there is none.

    `model`: a transformers causal LM (it becomes the engine's), or a transformers config for random weights; None loads
    `config.model`. `trainable=False` is a reference policy: no optimizer, no gradients. What is not supported is
    refused here, before a device is touched.
    """
    refuse_unsupported(config)
    ensure_group(config.device)
    groups = ParallelGroups.make(layout_of(config, dist.get_world_size()))
    loaded = load(config, model)
    module = loaded.module.to(resolve_device(config))
    planner, inputs = planner_and_inputs(config, module.config, groups)
    return Engine(config, FSDP2Executor(config, groups, module, inputs, trainable), planner, loaded.weights)


def layout_of(config: EngineConfig, world_size: int) -> ParallelLayout:
    """Return the layout of this many ranks. ValueError where the configuration's sizes do not divide them."""
    size = parse_context_parallel(config.context_parallel)
    if size == "dynamic":  # groups change from step to step: the plan says who shares what
        return ParallelLayout(dp=world_size)
    if world_size % size:
        raise ValueError(
            f"context_parallel='static:{size}' needs a multiple of {size} ranks, this run has {world_size}: start "
            "another number of processes, or use 'dynamic'"
        )
    return ParallelLayout.of_world(world_size, cp=size)


def planner_and_inputs(config: EngineConfig, model_config: Any, groups: ParallelGroups) -> tuple[Planner, InputBuilder]:
    """Return who plans the steps of transformers models, and how micro-batches enter them."""
    if config.context_parallel in ("off", "static:1"):
        planner = DataParallelPlanner(config.max_tokens_per_rank, groups.layout.plan_size)
        return planner, PackedInputs() if config.batching == "packed" else PaddedInputs()
    shared = ContextParallel.of(config, model_config, groups.layout.plan_size)
    return ContextParallelPlanner(shared), ShardedInputs(
        plan_index=groups.plan_index, layout=shared.layout, method=shared.method
    )

"""Steps in float64: megatron-core's layers beside stock transformers, one sequence at a time."""

from dataclasses import replace

import torch
from torch import Tensor

from engines.config import EngineConfig
from engines.execution.executor import Executor
from engines.execution.inputs import PackedInputs
from engines.families.registry import family_of
from engines.loading import cast_parameters
from engines.megatron.executor import MegatronExecutor
from engines.megatron.groups import release
from engines.megatron.layouts import LENGTHS, OPTIONS, STEPS, exported_by, model_of
from engines.parallel.groups import ParallelGroups
from engines.parallel.layout import ParallelLayout
from engines.parallel.planning import DataParallelPlanner
from engines.step import Engine
from engines.testing.float64 import Float64Stays
from engines.testing.plain_executor import PlainExecutor
from engines.testing.plain_router import PlainRouterExecutor
from engines.tiny import tiny_batch
from engines.weights.model_weights import ModelWeights
from seqpack.batches.objective import Objective

CONFIG = EngineConfig(**{**OPTIONS, "grad_clip": None})
"""Without clipping: torch's, in the plain executor, divides by the norm plus 1e-6."""
LOSSES = "Qwen3.5 MoE, router's loss"
ROUTED = replace(CONFIG, router_z_loss_coef=0.05)
"""For the model of that name, whose balancing loss its config asks for."""
EXACT = {
    "Qwen3": ParallelLayout(tp=2, pp=2),
    "Qwen3.5": ParallelLayout(tp=2, pp=2),
    "Qwen3.5 MoE": ParallelLayout(tp=2, pp=2, ep=2),
    LOSSES: ParallelLayout(dp=2, tp=2, ep=2),
}


def exact_steps(
    model: str, layout: ParallelLayout | None, objective: Objective
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Metrics of the first steps, and the weights after them. `layout` None: the plain executor, on one process."""
    module = cast_parameters(model_of(model), torch.float64)
    module.config._experts_implementation = "eager"  # transformers' default has no float64
    weights = ModelWeights.of(family_of(module.config), module)
    groups = ParallelGroups.make(layout or ParallelLayout())
    config, plain = (ROUTED, PlainRouterExecutor) if model == LOSSES else (CONFIG, PlainExecutor)
    with Float64Stays():
        executor: Executor = (
            plain(config, groups, module)
            if layout is None
            else MegatronExecutor(config, groups, module, PackedInputs())
        )
        planner = DataParallelPlanner(config.max_tokens_per_rank, groups.layout.plan_size)
        engine = Engine(config, executor, planner, weights)
        curve = [engine.train_batch(tiny_batch(list(LENGTHS), seed=step), objective) for step in range(STEPS)]
        trained = exported_by(engine)
    if layout is not None:
        release()
    return curve, trained

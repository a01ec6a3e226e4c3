"""Steps in float64: megatron-core's layers beside stock transformers, one sequence at a time."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from engines.config import EngineConfig
from engines.execution.executor import Executor
from engines.families.registry import family_of
from engines.inputs.planner_and_inputs import planner_and_inputs
from engines.loading import cast_parameters
from engines.megatron.megatron_executor import MegatronExecutor
from engines.megatron.runtime.process_groups import release
from engines.parallel.configured_layout import layout_of
from engines.parallel.groups import ParallelGroups
from engines.parallel.layout import ParallelLayout
from engines.parallel.planning import DataParallelPlanner
from engines.private_api import set_experts
from engines.proofs.float64 import KeepFloat64
from engines.proofs.megatron_layouts import LENGTHS, OPTIONS, STEPS, TRAINED, LayoutCase, exported_by, model_of
from engines.proofs.plain_executor import PlainExecutor
from engines.proofs.plain_router import PlainRouterExecutor
from engines.step import Engine
from engines.tiny import tiny_batch
from engines.weights.model_weights import ModelWeights
from seqpack.batches.jagged import jagged
from seqpack.batches.objective import Objective

CONFIG = EngineConfig(**{**OPTIONS, "grad_clip": None})
"""Settings without clipping: torch's, in the plain executor, divides by the norm plus 1e-6."""
LOSSES = "Qwen3.5 MoE, router's losses"
TP_PP = {"tensor_parallel": 2, "pipeline_parallel": 2}
EXACT = (
    LayoutCase("Qwen3", TP_PP),
    LayoutCase("Qwen3 MoE, raw top k, tied", {**TP_PP, "expert_parallel": 2}),
    LayoutCase("Qwen3.5", TP_PP),
    LayoutCase("Qwen3.5", {**TP_PP, "virtual_pipeline_parallel": 2}),
    LayoutCase("Qwen3.5", {"tensor_parallel": 2, "context_parallel": "static:2", "distributed_optimizer": True}),
    LayoutCase("Qwen3.5", {"pipeline_parallel": 2, "context_parallel": "dynamic"}),
    LayoutCase("Qwen3.5 MoE", {**TP_PP, "expert_parallel": 2}),
    LayoutCase("Qwen3.5 MoE", {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 2}),
    LayoutCase("Qwen3.5 MoE", {"pipeline_parallel": 2, "expert_parallel": 2, "context_parallel": "dynamic"}),
    LayoutCase(LOSSES, {"tensor_parallel": 2, "expert_parallel": 2}),
)
"""Cases without recomputed layers, which autograd computes outside of `KeepFloat64`."""


def exact_steps(case: LayoutCase, objective: Objective) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return the metrics of the first steps under megatron-core, and the weights after them. Collective."""
    config = replace(CONFIG, backend="megatron", **TRAINED.get(case.model, {}), **case.sizes)
    module = _module(case.model)
    weights = ModelWeights.of(family_of(module.config), module)
    groups = ParallelGroups.make(layout_of(config, dist.get_world_size()))
    with KeepFloat64():
        planner, inputs = planner_and_inputs(config, module.config, groups)
        executor = MegatronExecutor(config, groups, module, inputs)
        results = _run(Engine(config, executor, planner, weights), objective)
    release()
    return results


def stock_steps(model: str, objective: Objective) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Compute `exact_steps` by stock transformers, one sequence at a time, on one process."""
    module = _module(model)
    weights = ModelWeights.of(family_of(module.config), module)
    groups = ParallelGroups.make(ParallelLayout())
    config, plain = replace(CONFIG, **TRAINED.get(model, {})), PlainRouterExecutor if model == LOSSES else PlainExecutor
    with KeepFloat64():
        executor: Executor = plain(config, groups, module)
        return _run(Engine(config, executor, DataParallelPlanner(config.max_tokens_per_rank, 1), weights), objective)


def _module(model: str) -> Any:
    module: Any = cast_parameters(model_of(model), torch.float64)
    set_experts(module.config, "eager")  # transformers' default has no float64
    return module


def _run(engine: Engine, objective: Objective) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    model: Any = engine.executor.model
    vocabulary = model.config.get_text_config().vocab_size
    curve = [engine.train_batch(teacher_batch(step, vocabulary), objective) for step in range(STEPS)]
    return curve, exported_by(engine)


def teacher_batch(seed: int, vocabulary: int) -> TensorDict:
    """Return the batch of a step with a random teacher's keys: its four likeliest tokens, at some places fewer."""
    batch, draw = tiny_batch(list(LENGTHS), seed=seed), torch.Generator().manual_seed(seed)
    columns: tuple[list[Tensor], ...] = ([], [], [])
    for length in LENGTHS:
        table = torch.log_softmax(3 * torch.randn(length, vocabulary, generator=draw), -1)
        tokens = table.topk(4).indices.masked_fill(torch.rand(length, 4, generator=draw) < 0.1, -1)
        taken = torch.zeros(length, vocabulary + 1).scatter(1, tokens % (vocabulary + 1), 1)[:, :-1].bool()
        columns[0].append(tokens.t())
        columns[1].append(table.gather(1, tokens.clamp(min=0)).masked_fill(tokens < 0, 0).t())
        columns[2].append(table.masked_fill(taken, -torch.inf).logsumexp(-1))
    for name, rows in zip(("teacher_tokens", "teacher_log_probs", "teacher_rest"), columns, strict=True):
        batch[name] = jagged(rows)
    return batch

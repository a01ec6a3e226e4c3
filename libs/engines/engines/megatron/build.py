"""Build the parts of a Megatron engine: imported where a configuration asks for it."""

from typing import Any

import torch.distributed as dist

from engines.adapters.lora import add_adapters
from engines.config import EngineConfig
from engines.inputs.planner_and_inputs import planner_and_inputs
from engines.loading import DTYPES, open_model
from engines.megatron.config.model_sizes import refuse_unsupported_model
from engines.megatron.megatron_executor import MegatronExecutor
from engines.megatron.weights.adapter_weights import refuse_layers
from engines.parallel.configured_layout import layout_of
from engines.parallel.groups import ParallelGroups
from engines.step import Engine


def build_megatron_engine(config: EngineConfig, model: Any, trainable: bool) -> Engine:
    """Build an engine, as `engines.build.build_engine`; refuse a model that cannot run before its weights are read."""
    layout = layout_of(config, dist.get_world_size())
    described = open_model(config) if model is None else model
    refuse_unsupported_model(config, getattr(described, "config", described), layout)
    groups = ParallelGroups.make(layout)
    opened = open_model(config, described)
    if config.lora.rank and trainable:
        refuse_layers(add_adapters(opened.module, config.lora, opened.weights, DTYPES[config.master_dtype]))
    planner, inputs = planner_and_inputs(config, opened.module.config, groups)
    executor = MegatronExecutor(config, groups, opened.module, inputs, trainable, opened.disk, opened.weights.names)
    return Engine(config, executor, planner, opened.weights)

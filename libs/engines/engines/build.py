"""Build an engine."""

from pkgutil import resolve_name
from typing import Any

import torch.distributed as dist

from engines.adapters.lora import add_adapters
from engines.backends import TRAIN_BACKENDS
from engines.capability import refuse_unsupported, untested_options
from engines.config import EngineConfig
from engines.fast.support import use_compiled_layers, use_replicated_weights
from engines.fsdp2.fsdp2_executor import FSDP2Executor
from engines.inputs.model_inputs import InputBuilder
from engines.inputs.planner_and_inputs import planner_and_inputs
from engines.launch import ensure_group
from engines.loading import DTYPES, device_of, open_model, read_config, resolve_device
from engines.parallel.configured_layout import layout_of
from engines.parallel.groups import ParallelGroups, refuse_other_timeout
from engines.protocol import TrainEngine
from engines.prove.options_admission import admit_on_ranks
from engines.prove.traced import traced_refusal
from engines.reference_policy import reference_config
from engines.replicated.replicated_executor import ReplicatedExecutor
from engines.step import Engine
from engines.weights.disk_names import OWN_NAMES, DiskNames
from engines.weights.disk_weights import DiskWeights
from engines.weights.hub import model_directory


def build_engine(config: EngineConfig, model: Any = None, trainable: bool = True) -> TrainEngine:
    """Build an engine over all ranks of the current process group; a group of one is made where there is none.

    `model`: a transformers causal LM (it becomes the engine's), a transformers config for random weights, or what
    `engines.loading.open_model` opened; None loads `config.model`. `trainable=False` is a reference policy: no
    optimizer, no gradients, no adapter. What is not supported is refused here, before a device is touched.
    """
    refuse_unsupported(config, trainable)
    ensure_group(config.device, config.collective_timeout_seconds)
    refuse_other_timeout(config)
    if (described := _described(config, model)) is not None:
        admit_on_ranks(config, described, trainable)
    engine: TrainEngine = resolve_name(TRAIN_BACKENDS[config.backend].builder)(config, model, trainable)
    return engine


def _described(config: EngineConfig, model: Any) -> Any:
    """Return the transformers config of a model, as `build_engine` takes it; None where no proof needs one."""
    if config.prove == "off" or not any(untested_options(config)):
        return None
    if model is None and config.model is not None:
        return read_config(model_directory(config.model))
    return getattr(model, "config", model)


def build_reference(config: EngineConfig, model: Any = None) -> TrainEngine:
    """Build the frozen reference model beside an engine of this configuration, and leave it in host memory.

    Set it as `engine.reference`; `base_policy(engine)` scores by it. Collective.
    """
    reference = build_engine(reference_config(config), model, trainable=False)
    reference.offload()
    return reference


def build_fsdp2_engine(config: EngineConfig, model: Any, trainable: bool) -> Engine:
    """Build an engine of torch's own modules, as `build_engine`: weights sharded (FSDP2) or replicated."""
    groups = ParallelGroups.make(layout_of(config, dist.get_world_size()))
    opened = open_model(config, model)
    module = opened.module.to(resolve_device(config)) if opened.disk is None else opened.module
    if config.lora.rank and trainable:
        add_adapters(module, config.lora, opened.weights, DTYPES[config.master_dtype])
    planner, inputs = planner_and_inputs(config, module.config, groups)
    executor = executor_of(config, groups, module, inputs, trainable, opened.disk, opened.weights.names)
    return Engine(config, executor, planner, opened.weights)


def executor_of(
    config: EngineConfig,
    groups: ParallelGroups,
    module: Any,
    inputs: InputBuilder,
    trainable: bool,
    disk: DiskWeights | None = None,
    names: DiskNames = OWN_NAMES,
) -> FSDP2Executor:
    """Return the executor for this device: weights sharded or replicated, layers compiled or not.

    `disk`: where the values of an empty module are; `names`: of its parameters there.
    """
    device = device_of(config, module)
    replicated = use_replicated_weights(config, device, groups.layout.world_size)
    compiled = use_compiled_layers(config, module.config, device, traced_refusal)
    kind = ReplicatedExecutor if replicated else FSDP2Executor
    return kind(config, groups, module, inputs, trainable, compiled, disk, names)

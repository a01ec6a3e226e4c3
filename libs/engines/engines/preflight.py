"""Refusals that depend on a model, before a rank is started: those of the build itself, called on an empty module."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig

from engines.adapters.lora import adapted_layers
from engines.backends import supports_backend
from engines.capability import unsupported
from engines.config import EngineConfig, parse_context_parallel, parse_options
from engines.execution.learning_rates import rate_scales
from engines.experts.placement import check_sizes
from engines.families.registry import family_of
from engines.fast.support import use_compiled_layers, use_replicated_weights
from engines.inputs.context_parallel import ContextParallel
from engines.loading import LoadedModel, resolve_device
from engines.media.vision_settings import VisionSettings
from engines.parallel.configured_layout import layout_of
from engines.prove.options_admission import admit_options
from engines.prove.traced import traced_refusal
from engines.scoring.router_counts import check_forwards_ahead


def refusals(config: EngineConfig, model: PretrainedConfig, ranks: int, opened: LoadedModel | None = None) -> list[str]:
    """Return the text of all for which an engine of this configuration could not be built over `ranks` ranks.

    No weight is read, and no group is made. Options that no test has run together are proven, where nothing else is
    wrong (`engines.prove.options`).

    Args:
        config: the settings.
        model: the configuration of the model.
        ranks: how many there are to be.
        opened: the model itself (`engines.loading.open_model`), which stays as it is; without it what depends on names
            and shapes of its layers is not told.
    """
    reasons = unsupported(config)
    if not supports_backend(config.backend):
        return reasons  # its own checks are not here either
    of_module = () if opened is None else _of_module(config, opened, ranks)
    for check in (*_of_config(config, model, ranks), *of_module):
        try:
            check()
        except ValueError as error:
            reasons.append(str(error))
    if not reasons:  # a proof takes its time
        try:
            admit_options(config, model, ranks)
        except ValueError as error:
            reasons.append(str(error))
    return list(dict.fromkeys(reasons))


def _of_config(config: EngineConfig, model: PretrainedConfig, ranks: int) -> Iterator[Callable[[], object]]:
    """Yield the checks that read a model's configuration alone."""
    yield partial(layout_of, config, ranks)
    if config.vision != "off":
        yield partial(VisionSettings.of, model)
    if parse_context_parallel(config.context_parallel) != 1:
        yield partial(ContextParallel.of, config, model, ranks)
    if config.backend == "megatron":
        from engines.megatron.config.model_sizes import refuse_unsupported_model  # megatron-core may be absent
        from engines.megatron.config.transformer_options import checked_options  # the same

        yield lambda: refuse_unsupported_model(config, model, layout_of(config, ranks))
        yield partial(checked_options, parse_options(config.transformer_options))
    if config.backend == "fsdp2":
        yield lambda: use_replicated_weights(config, resolve_device(config), ranks)


def _of_module(config: EngineConfig, opened: LoadedModel, ranks: int) -> Iterator[Callable[[], object]]:
    """Yield the checks that read the names and shapes of a module."""
    module = opened.module
    if config.backend == "fsdp2":  # whose layers are compiled is asked of a family that is known by now
        yield lambda: use_compiled_layers(config, module.config, resolve_device(config), traced_refusal)
    if config.router_forwards_ahead:
        yield partial(_check_forwards_ahead, config, module)
    if config.backend == "fsdp2" and config.expert_parallel > 1:
        yield partial(check_sizes, module, config.expert_parallel, max(1, ranks // config.expert_parallel))
    if config.lora.rank:
        yield partial(_check_adapters, config, module)
    elif config.learning_rates and config.vision != "frozen":  # else what is trained is known when it is built
        yield partial(rate_scales, config, module, opened.weights.names)


def _check_forwards_ahead(config: EngineConfig, module: torch.nn.Module) -> None:
    settings: Any = module.config
    coefficients = config.router_aux_loss_coef, config.router_z_loss_coef
    check_forwards_ahead(config.router_forwards_ahead or 0, family_of(settings).auxiliary_loss(settings, *coefficients))


def _check_adapters(config: EngineConfig, module: torch.nn.Module) -> None:
    layers: dict[str, Any] = adapted_layers(module, config.lora)
    if config.backend == "megatron":
        from engines.megatron.weights.adapter_weights import refuse_layers  # megatron-core may be absent

        refuse_layers(layers)

"""The choice of the optimizer of Megatron's parameters, made once, with its reason for logs and `state_summary()`."""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as core

from engines.capability import Supported, Unsupported, core_optimizer
from engines.config import EngineConfig
from engines.execution.optimizer import name_of
from engines.megatron.optimizers.buffer_optimizer import TorchUpdates, Updates
from engines.megatron.optimizers.core_optimizer import CoreUpdates
from engines.megatron.weights.parameters import HeldParameter

LOG = logging.getLogger(__name__)


def choose(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> tuple[bool, str]:
    """Return whether megatron-core's own optimizer is used for a model that computes in `dtype`, and why.

    ValueError where the configuration asks for it and it cannot be used.
    """
    answer = core_optimizer(config)
    alone = core.USING_PYTORCH_OPTIMIZER and not config.distributed_optimizer
    if isinstance(answer, Supported) and dtype == torch.float64 and not alone:
        answer = Unsupported("megatron-core's optimizers are of float32 and bfloat16")
    if config.megatron_optimizer == "core" and isinstance(answer, Unsupported):
        raise ValueError(f"megatron_optimizer='core' cannot be used: {answer.reason}; set it to 'auto' or 'torch'")
    if config.megatron_optimizer != "auto":
        return config.megatron_optimizer == "core", f"megatron_optimizer={config.megatron_optimizer!r}"
    if isinstance(answer, Unsupported):
        return False, answer.reason
    if device.type == "cuda":
        return True, "megatron-core's runs what is asked for on this device"
    return False, f"on device {device.type} megatron-core's would run torch's AdamW too: its own kernels are CUDA's"


def updates_for(
    config: EngineConfig,
    chunks: Sequence[Any],
    parameters: Sequence[HeldParameter],
    world: dist.ProcessGroup,
    scales: Mapping[str, float] | None,
    matrices: Collection[str] = (),
) -> tuple[Updates | None, str]:
    """Return the optimizer of a rank's parameters, and a text of what it is and why. Collective; see `TorchUpdates`.

    None where nothing is trained (`scales` None). ValueError of `choose`.
    """
    if scales is None:
        return None, name_of(None)
    own, reason = choose(config, next(chunks[0].parameters()).device, chunks[0].config.params_dtype)
    arguments = config, chunks, parameters, world
    updates = CoreUpdates(*arguments) if own else TorchUpdates(*arguments, scales, matrices)
    text = f"{updates} ({reason})"
    LOG.info("optimizer: %s", text)
    return updates, text

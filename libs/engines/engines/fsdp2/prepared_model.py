"""What becomes of a transformers model before it is sharded: its operations, recomputation, and what is trained."""

from typing import Any

import torch

from engines.adapters.lora import set_trainable
from engines.capability import Supported, Unsupported
from engines.config import EngineConfig
from engines.devices.adaptations import Applied
from engines.devices.host_layers import use_host_norms
from engines.devices.npu_layers import npu_operators_enabled, use_npu_operators
from engines.families.registry import family_of
from engines.families.torch_operations import choose_torch_operations
from engines.fsdp2.activations import recompute_layers
from engines.scoring.compiled_model import compile_layers
from engines.scoring.packed_model import adapt_for_packing
from engines.scoring.read_rows import compute_read_rows
from seqpack.adapters.mixers import Adaptation


def prepare_model(
    config: EngineConfig, model: Any, device: torch.device, compiled: Supported | Unsupported, trainable: bool
) -> tuple[Applied | None, Adaptation | None]:
    """Give `model` the run's operations and trained parameters; return its NPU operators and packing, if any."""
    operators = use_npu_operators(model) if npu_operators_enabled(config, device) else None
    if device.type == "cpu":
        use_host_norms(model)
    packing = adapt_for_packing(model) if config.batching == "packed" else None
    if packing is None:
        choose_torch_operations(model)
    if isinstance(compiled, Supported):
        compile_layers(model, compiled)
    elif packing is not None:
        compute_read_rows(model)
    model.eval()
    if config.gradient_checkpointing:
        recompute_layers(model, config.activation_offload)
    set_trainable(model, trainable)
    tower = family_of(model.config).tower(model)
    if tower is not None and config.vision == "frozen":
        tower.requires_grad_(False)
    return operators, packing

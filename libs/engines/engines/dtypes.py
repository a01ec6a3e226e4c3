"""The dtypes that a configuration names."""

import torch

from engines.config import EngineConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Return the dtype that the model computes in."""
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[config.dtype]

"""Whether the adapters of a checkpoint are an engine's own: trained over the same base, and scaled the same."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engines.adapters.base_digest import BASE, check_base
from engines.config import EngineConfig
from engines.lora_config import LoraConfig
from engines.storage.checkpoint import read_tensor

ADAPTER_KEY = "adapter"
"""Key in a checkpoint's facts of the fields that make its adapters' scale."""
_SCALE = ("rank", "alpha", "rank_stabilized")


def adapter_metadata(config: LoraConfig) -> dict[str, Any]:
    """Return what a checkpoint records of the scale of its adapters; an empty dict where there are none."""
    return {ADAPTER_KEY: {name: getattr(config, name) for name in _SCALE}} if config.rank else {}


def check_adapter(
    config: EngineConfig, state: Mapping[str, Any], checkpoint: Path, metadata: Mapping[str, Any]
) -> None:
    """Raise ValueError where a checkpoint's adapters have another scale or another base. Collective; reads the digest.

    `state`: what the checkpoint would be read into; one that has no base's digest has no adapters.
    """
    own = state["model"].get(BASE)
    if own is None:
        return
    check_scale(config.lora, metadata.get(ADAPTER_KEY), checkpoint)
    check_base(read_tensor(checkpoint, "model", BASE, torch.empty_like(own)), own, config.model)


def check_scale(own: LoraConfig, saved: Mapping[str, Any] | None, checkpoint: Path) -> None:
    """Raise ValueError where the adapters were saved with another scale than the engine's.

    A checkpoint from before the scale was written down loads with a warning: its shapes tell the rank alone.
    """
    if saved is None:
        warnings.warn(
            f"{checkpoint} does not say how its adapters were scaled: they are taken to have had lora alpha "
            f"{own.alpha} and rank_stabilized {own.rank_stabilized}; check that they were trained so",
            stacklevel=2,
        )
        return
    for name in _SCALE:
        if saved[name] != getattr(own, name):
            raise ValueError(
                f"{checkpoint}: the adapter was trained with lora {name} {saved[name]}, this engine has "
                f"{getattr(own, name)}, which would scale it otherwise: set lora {name} to {saved[name]}"
            )

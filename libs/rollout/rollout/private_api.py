"""Private names of torch, vLLM and Ray that rollout uses: what a new version may break is here.

Packages that need not be installed are imported by the function that uses them.
"""

from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_ONEDNN: bool = torch.backends.mkldnn.is_available()
onednn_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if _ONEDNN else None
"""What torch's own compiler calls for a frozen linear layer; None in a build without oneDNN."""
onednn_pack: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None) if onednn_linear is not None else None
"""What packs its matrix."""


def writes(tensor: Tensor) -> int:
    """Return how often a tensor was written to, as torch counts it."""
    return tensor._version


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling a module runs hooks beside its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def gloo_options(limit: timedelta, host: str) -> Any:
    """Return options of a gloo group that listens on one address alone."""
    gloo = vars(dist.ProcessGroupGloo)["_Options"]()  # torch's stubs lack the class
    gloo._timeout = limit
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return gloo


def set_timeout(options: Any, limit: timedelta) -> None:
    """Let a process group with these options wait as long."""
    options._timeout = limit


def ray_constants() -> Any:
    """Return the constants that Ray reads when it starts."""
    return import_module("ray._private.ray_constants")


def forget_processor(model: Any) -> None:
    """Remove the multi-modal processor that vLLM registered for its model's class."""
    del model._processor_factory

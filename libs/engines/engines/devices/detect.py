"""The device layer by a device's name."""

import sys

import torch

from engines.devices.base import Devices
from engines.devices.cpu import Cpu
from engines.devices.cuda import Cuda
from engines.devices.npu import Npu

_KINDS: dict[str, Devices] = {"cpu": Cpu(), "cuda": Cuda(), "npu": Npu()}


def devices_of(device: str | torch.device) -> Devices:
    """Return the layer for a device, or for the name of a kind; "auto" is CUDA where torch sees it, else the CPU.
    ValueError for a kind that is not there."""
    kind = device.type if isinstance(device, torch.device) else device
    if kind == "auto":
        kind = "cuda" if _KINDS["cuda"].missing() is None else "cpu"
    if kind not in _KINDS:
        raise ValueError(f"device must be one of auto, {', '.join(_KINDS)}, got {kind!r}")
    return _KINDS[kind]


def accelerators_here() -> list[Devices]:
    """Return the device kinds beside the CPU that this process sees, without importing torch_npu."""
    kinds = ["cuda"] + (["npu"] if "torch_npu" in sys.modules else [])
    return [_KINDS[kind] for kind in kinds if _KINDS[kind].missing() is None]

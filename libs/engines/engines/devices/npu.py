"""Ascend NPUs, through torch_npu: imported where it is asked for."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from engines.devices.accelerator import Accelerator
from engines.devices.hccl import HcclSettings


class Npu(Accelerator):
    """See `engines.devices.base.Devices`."""

    kind = "npu"
    backend = "cpu:gloo,npu:hccl"
    interfaces: tuple[str, ...] = ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")

    @property
    def module(self) -> Any:
        """torch.npu, which exists once torch_npu is imported."""
        torch_npu()
        return torch.get_device_module("npu")

    def missing(self) -> str | None:
        """Return why there is no NPU: torch_npu is not installed, or sees none; else None."""
        if find_spec("torch_npu") is None:
            return f"torch_npu is not installed: install the one for torch {torch.__version__.split('+')[0]}"
        return None if self.module.is_available() else "torch_npu sees no NPU: see npu-smi info, and CANN's set_env.sh"

    def environment(self, given: Mapping[str, str], ranks: int = 1) -> dict[str, str]:
        """Return the connect timeout and HCCL's ports. ValueError for a value that HCCL would not take, and for fewer
        ports than the machine has ranks."""
        settings = HcclSettings.read(given)
        settings.check_room(ranks)
        return {name: value for name, value in settings.environment().items() if name not in given}


def torch_npu() -> Any:
    """Import and return the package torch_npu."""
    return import_module("torch_npu")

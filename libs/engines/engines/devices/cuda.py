"""CUDA devices."""

from typing import Any

import torch

from engines.devices.accelerator import Accelerator


class Cuda(Accelerator):
    """See `engines.devices.base.Devices`."""

    kind = "cuda"
    backend = "cpu:gloo,cuda:nccl"
    interfaces: tuple[str, ...] = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

    @property
    def module(self) -> Any:
        """torch.cuda."""
        return torch.cuda

    def missing(self) -> str | None:
        """Return why there is no CUDA device here; None where torch sees one."""
        return None if torch.cuda.is_available() else "torch sees no CUDA device"

"""The CPU: it has no streams, and torch does not count its memory."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor

from engines.devices.base import MemoryFigures


class Cpu:
    """See `engines.devices.base.Devices`."""

    kind = "cpu"
    backend = "gloo"
    interfaces: tuple[str, ...] = ("GLOO_SOCKET_IFNAME",)
    overlaps = False

    def missing(self) -> str | None:
        """Return None: there is always a CPU."""
        return None

    def missing_dtype(self, dtype: torch.dtype) -> bool:
        """Return False: torch computes in every dtype on a CPU."""
        del dtype
        return False

    def use(self, local_rank: int) -> None:
        """Do nothing: there is one CPU device."""

    def current(self) -> torch.device:
        """Return the CPU device."""
        return torch.device("cpu")

    def environment(self, given: Mapping[str, str], ranks: int = 1) -> dict[str, str]:
        """Return no variables: gloo needs none."""
        del given, ranks
        return {}

    def new_stream(self) -> NoReturn:
        """Raise RuntimeError: ask `overlaps` first."""
        raise RuntimeError("a CPU has no streams: what is to overlap asks `overlaps` first")

    def current_stream(self) -> NoReturn:
        """Raise RuntimeError."""
        self.new_stream()

    def new_event(self) -> NoReturn:
        """Raise RuntimeError."""
        self.new_stream()

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Raise RuntimeError."""
        del stream
        self.new_stream()

    def memory(self) -> MemoryFigures | None:
        """Return None: torch does not count host memory."""
        return None

    def reset_peak(self) -> None:
        """Do nothing: there is no peak."""

    def release(self) -> None:
        """Do nothing: torch keeps no unused memory."""

    def random_state(self) -> Tensor | None:
        """Return None: the host's generator is saved anyway."""
        return None

    def set_random_state(self, state: Tensor) -> None:
        """Raise ValueError: there is no generator but the host's."""
        del state
        raise ValueError("a CPU has no random state beside the host's")

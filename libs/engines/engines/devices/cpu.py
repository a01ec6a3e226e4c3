"""The CPU: no streams, and memory that nobody counts."""

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
        """Return nothing is."""
        return None

    def lacks(self, dtype: torch.dtype) -> bool:
        """Torch computes in all on any."""
        del dtype
        return False

    def use(self, local_rank: int) -> None:
        """There is one."""

    def current(self) -> torch.device:
        """Return the one that there is."""
        return torch.device("cpu")

    def environment(self, given: Mapping[str, str], ranks: int = 1) -> dict[str, str]:
        """Gloo needs none."""
        del given, ranks
        return {}

    def new_stream(self) -> NoReturn:
        """RuntimeError: ask `overlaps` first."""
        raise RuntimeError("a CPU has no streams: what is to overlap asks `overlaps` first")

    def current_stream(self) -> NoReturn:
        """RuntimeError."""
        self.new_stream()

    def new_event(self) -> NoReturn:
        """RuntimeError."""
        self.new_stream()

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """RuntimeError."""
        del stream
        self.new_stream()

    def memory(self) -> MemoryFigures | None:
        """Not counted."""
        return None

    def reset_peak(self) -> None:
        """Not counted."""

    def release(self) -> None:
        """Nothing is kept."""

    def random_state(self) -> Tensor | None:
        """Return the host's is saved anyway."""
        return None

    def set_random_state(self, state: Tensor) -> None:
        """ValueError: there is none to put back."""
        del state
        raise ValueError("a CPU has no random state beside the host's")

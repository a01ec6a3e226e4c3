"""The interface of a kind of device, and the memory it reports."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes of one device as torch's allocator counts them, and all that the device has."""

    allocated: int
    peak: int
    total: int


class Devices(Protocol):
    """One kind of device. Every call is about this process's current one."""

    kind: str
    """torch's name of the kind: "cpu", "cuda", "npu"."""
    backend: str
    """Backend of torch.distributed, for tensors of the host too: "cpu:gloo,cuda:nccl"."""
    interfaces: tuple[str, ...]
    """Variables that name the network interface of its collectives."""
    overlaps: bool
    """Whether the host runs ahead of it, so that streams have something to overlap."""

    def missing(self) -> str | None:
        """Return why there is no such device here; None where there is one."""

    def missing_dtype(self, dtype: torch.dtype) -> bool:
        """Return whether the current device has no arithmetic of this dtype."""

    def use(self, local_rank: int) -> None:
        """Make one device of this machine the current one, by the rank among its processes. ValueError where there is
        none."""

    def current(self) -> torch.device:
        """Return the current device."""

    def environment(self, given: Mapping[str, str], ranks: int = 1) -> dict[str, str]:
        """Return the variables that the collectives of `ranks` ranks on this machine need and `given` lacks. ValueError
        for a value that they would not take."""

    def new_stream(self) -> Any:
        """Make a stream beside the current one."""

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context manager inside which work goes to `stream`."""

    def current_stream(self) -> Any:
        """Return the stream that work goes to."""

    def new_event(self) -> Any:
        """Make an event, to be recorded on a stream."""

    def memory(self) -> MemoryFigures | None:
        """Return the figures of the allocator; None where torch does not count."""

    def reset_peak(self) -> None:
        """Reset the peak to what is allocated now."""

    def release(self) -> None:
        """Free memory that torch keeps and nobody uses."""

    def random_state(self) -> Tensor | None:
        """Return the state of the device's generator; None where it is the host's."""

    def set_random_state(self, state: Tensor) -> None:
        """Set the state of the device's generator."""

"""The part that CUDA devices and NPUs share: torch's module for each has the same names."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from engines.devices.base import MemoryFigures


class Accelerator:
    """See `engines.devices.base.Devices`; `module` is torch.cuda or torch.npu."""

    kind: str
    backend: str
    interfaces: tuple[str, ...]
    overlaps = True

    @property
    def module(self) -> Any:
        """torch's module of this kind."""
        raise NotImplementedError

    def missing(self) -> str | None:
        """Return why there is no such device here."""
        raise NotImplementedError

    def environment(self, given: Mapping[str, str], ranks: int = 1) -> dict[str, str]:
        """Return no variables: the collectives need none."""
        del given, ranks
        return {}

    def missing_dtype(self, dtype: torch.dtype) -> bool:
        """Return whether it is bfloat16 on an older device, which lacks it or emulates it slowly through float32."""
        emulated = False
        return dtype == torch.bfloat16 and not self.module.is_bf16_supported(emulated)

    def use(self, local_rank: int) -> None:
        """Make the device of this number the current one, modulo the number of devices."""
        if reason := self.missing():
            raise ValueError(f"device={self.kind!r} but {reason}: use device='cpu' or 'auto'")
        self.module.set_device(local_rank % self.module.device_count())

    def current(self) -> torch.device:
        """Return the current device, with its number."""
        return torch.device(self.kind, self.module.current_device())

    def new_stream(self) -> Any:
        """Return a stream of the current device."""
        return self.module.Stream()

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return torch's context manager for a stream."""
        context: AbstractContextManager[Any] = self.module.stream(stream)
        return context

    def current_stream(self) -> Any:
        """Return the stream of the current device that work goes to."""
        return self.module.current_stream()

    def new_event(self) -> Any:
        """Return an event without timing."""
        return self.module.Event()

    def memory(self) -> MemoryFigures | None:
        """Return the figures of torch's allocator."""
        _, total = self.module.mem_get_info()
        return MemoryFigures(self.module.memory_allocated(), self.module.max_memory_allocated(), total)

    def reset_peak(self) -> None:
        """Reset the peak of the allocator's statistics."""
        self.module.reset_peak_memory_stats()

    def release(self) -> None:
        """Free the memory that torch's allocator keeps unused."""
        self.module.empty_cache()

    def random_state(self) -> Tensor | None:
        """Return the state of the current device's generator."""
        state: Tensor = self.module.get_rng_state()
        return state

    def set_random_state(self, state: Tensor) -> None:
        """Set the state of the current device's generator."""
        self.module.set_rng_state(state)

"""The functions and classes of torch_npu.npu that the stand-in has, over its library."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

TOTAL_MEMORY = 64 * 2**30


def number(device: Any) -> int:
    """Return the number of a device: an int, a name, a torch.device, or None for the current one."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class _OnNpu(type):
    """A metaclass of classes whose calls make torch's own objects: its events compare with no subclass."""

    made: type

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.made) and value.device.type == "npu"  # type: ignore[attr-defined]


class Stream(metaclass=_OnNpu):
    """A torch.Stream of a device."""

    made = torch.Stream

    def __new__(cls, device: Any = None, priority: int = 0) -> Any:
        """Return torch's own stream."""
        return torch.Stream(torch.device("npu", number(device)), priority=priority)


class Event(metaclass=_OnNpu):
    """A torch.Event."""

    made = torch.Event

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        """Return torch's own event."""
        return torch.Event("npu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


class StreamContext:
    """A context in which work goes to a stream; None changes nothing."""

    def __init__(self, stream_ctx: Any) -> None:
        self.stream = stream_ctx

    def __enter__(self) -> None:
        self.before = torch.accelerator.current_stream()
        if self.stream is not None:
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *error: Any) -> None:
        torch.accelerator.set_stream(self.before)


class Device:
    """A context in which another device is the current one."""

    def __init__(self, device: Any) -> None:
        self.index = number(device)

    def __enter__(self) -> None:
        self.before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self.index)

    def __exit__(self, *error: Any) -> None:
        torch.accelerator.set_device_index(self.before)


def classes() -> dict[str, Any]:
    """Return classes by their names in torch_npu.npu."""
    return {"Stream": Stream, "Event": Event, "StreamContext": StreamContext, "device": Device}


def functions(library: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return functions by their names in torch_npu.npu; the wheel's signatures check their arguments first."""
    accelerator, devices = torch.accelerator, library.devices
    generators = [library.default_generator(index) for index in range(devices)]

    def set_rng_state(new_state: Tensor, device: Any = "npu") -> None:
        generators[number(device)].set_state(new_state)

    def seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: devices,
        "current_device": accelerator.current_device_index,
        "set_device": lambda device: accelerator.set_device_index(number(device)),
        "get_device_name": lambda *_: "a stand-in on the CPU",
        "synchronize": lambda device=None: accelerator.synchronize(number(device)),
        "current_stream": lambda device=None: accelerator.current_stream(number(device)),
        "default_stream": lambda device=None: torch.Stream(
            stream_id=0, device_index=number(device), device_type=torch.Stream("npu").device_type
        ),
        "set_stream": accelerator.set_stream,
        "stream": StreamContext,
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: library.allocated(number(device)),
        "max_memory_allocated": lambda device=None: library.peak(number(device)),
        "reset_peak_memory_stats": lambda device=None: library.reset_peak(number(device)),
        "mem_get_info": lambda device=None: (TOTAL_MEMORY - library.allocated(number(device)), TOTAL_MEMORY),
        "manual_seed": lambda seed: generators[number(None)].manual_seed(seed),
        "manual_seed_all": seed_all,
        "initial_seed": lambda: generators[number(None)].initial_seed(),
        "get_rng_state": lambda device="npu": generators[number(device)].get_state(),
        "set_rng_state": set_rng_state,
        "is_bf16_supported": lambda *_: True,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16, torch.float32],
    }


def private(library: ModuleType) -> dict[str, Any]:
    """Return the attributes that torch reads from a device's module beside its public names."""
    generators = tuple(library.default_generator(index) for index in range(library.devices))
    return {
        "default_generators": generators,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
    }

"""Memory of a CUDA device that two processes see, and pinned host memory.

CUDA's driver is called directly: its interface is the same for every release of torch, and the two processes may have
different ones. What is allocated here is not PyTorch's, whose allocator may cut it out of something larger.
"""

import ctypes
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

PREFIX = "cuda-ipc:"
"""Prefix of a path that is no file's."""
HANDLE_BYTES = 64
_PORTABLE, _LAZY_PEERS = 1, 1
_ALREADY_REGISTERED = 712


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Region:
    """Bytes on a device as a CUDA array interface; PyTorch keeps it as long as a view of it."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def allocate(nbytes: int) -> Tensor:
    """Return `u8[nbytes]` on the current device, not initialised; the memory is freed with the last view of it.

    Raises:
        RuntimeError: the device has not so much.
    """
    _enter()
    pointer = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
    return _tensor(pointer.value, nbytes, "cuMemFree_v2")


def path_of(memory: Tensor) -> str:
    """Return a path by which another process of this host may open what `allocate` returned."""
    _enter()
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(memory.data_ptr()))
    return PREFIX + bytes(handle).hex()


def opened(path: str, nbytes: int) -> Tensor:
    """Open another process's memory on the current device as `u8[nbytes]`; it is closed with the last view of it.

    Raises:
        RuntimeError: it can't be opened here: it is gone, is this process's own, or lies on a device out of reach.
    """
    _enter()
    pointer = ctypes.c_uint64()
    handle = _Handle.from_buffer_copy(bytes.fromhex(path.removeprefix(PREFIX)))
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, ctypes.c_uint(_LAZY_PEERS))
    return _tensor(pointer.value, nbytes, "cuIpcCloseMemHandle")


def reader(path: str) -> Callable[[int, int], Tensor]:
    """Open another process's memory, on this device or one beside it, and return what copies its bytes to this device:
    by the first one and their number, as `u8`. Nothing is allocated on the other device.

    Raises:
        RuntimeError: it can't be opened here: see `opened`.
    """
    _enter()
    pointer = ctypes.c_uint64()
    handle = _Handle.from_buffer_copy(bytes.fromhex(path.removeprefix(PREFIX)))
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, ctypes.c_uint(_LAZY_PEERS))
    start = pointer.value

    def read(first: int, nbytes: int) -> Tensor:
        near = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        source, target = ctypes.c_uint64(start + first), ctypes.c_uint64(near.data_ptr())
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _call("cuMemcpyDtoDAsync_v2", target, source, ctypes.c_size_t(nbytes), stream)
        return near

    weakref.finalize(read, _release, "cuIpcCloseMemHandle", start).atexit = False  # the driver is gone by then
    return read


def pin(memory: Tensor) -> None:
    """Register host memory for direct reads by devices; do nothing where it is registered already. Copies from other
    memory take several times as long.

    Raises:
        RuntimeError: the kernel or the driver does not allow it.
    """
    _enter()
    start, nbytes = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel() * memory.element_size())
    _call("cuMemHostRegister_v2", start, nbytes, ctypes.c_uint(_PORTABLE), fine=(_ALREADY_REGISTERED,))


def unpin(memory: Tensor) -> None:
    """Undo `pin`, before the memory is freed."""
    _enter()
    _call("cuMemHostUnregister", ctypes.c_void_p(memory.data_ptr()))


def pin_if_allowed(memory: Tensor) -> bool:
    """Call `pin`, or log a warning with the reason; return whether the memory is pinned now."""
    try:
        pin(memory)
    except RuntimeError as error:
        log.warning("weights pass through memory that is not pinned, which is slower: %s", error)
        return False
    return True


def _tensor(pointer: int, nbytes: int, release: str) -> Tensor:
    region = _Region(pointer, nbytes)
    weakref.finalize(region, _release, release, pointer).atexit = False  # the driver is gone by then
    return torch.as_tensor(region, device=torch.device("cuda", torch.cuda.current_device()))


def _release(release: str, pointer: int) -> None:
    _enter()
    _call(release, ctypes.c_uint64(pointer))


def _enter() -> None:
    """Make PyTorch's context current in this thread, which is what its first call does; the driver works on it."""
    torch.cuda.synchronize()


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any, fine: tuple[int, ...] = ()) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status and status not in fine:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        why = text.value.decode() if text.value else "no word on it"
        raise RuntimeError(f"CUDA's {name} says {why} ({status})")

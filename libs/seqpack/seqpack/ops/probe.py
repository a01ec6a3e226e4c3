"""Which implementation of an operation can run a given call: asked at call time, never at import."""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)


class Availability(NamedTuple):
    """Whether a backend can run, and why not (or a remark) in words."""

    available: bool
    reason: str


@dataclass(frozen=True)
class OpRequest:
    """What a call asks of a backend: operation, device, dtype, whether gradients flow, sizes kernels care about."""

    op: str
    device: torch.device
    dtype: torch.dtype
    grad: bool
    sizes: Mapping[str, int | bool]

    @classmethod
    def of(cls, op: str, *tensors: Tensor | None, **sizes: int | bool) -> "OpRequest":
        """Describe a call by its tensors (the first one sets device and dtype) and named sizes."""
        used = [t for t in tensors if t is not None]
        for other in used[1:]:
            if other.device != used[0].device:
                raise ValueError(f"{op}: operands are on {used[0].device} and {other.device}; move them to one device")
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in used)
        return cls(op, used[0].device, used[0].dtype, grad, sizes)


@dataclass(frozen=True)
class _Backend:
    """A named implementation: `refuse` gives the reason it cannot run a request, or None."""

    target: str
    refuse: Callable[[OpRequest], str | None]
    automatic: bool = True

    def load(self) -> Callable[..., Any]:
        return _loaded(self.target)


@cache
def _loaded(target: str) -> Callable[..., Any]:
    module, name = target.split(":")
    result: Callable[..., Any] = getattr(import_module(module), name)
    return result


def _accept(_: OpRequest) -> None:
    """Accept every request."""


@cache
def installed(package: str, distribution: str | None = None) -> str | None:
    """Return the version of an importable package ('' when it has no metadata), or None where it is not installed."""
    if find_spec(package) is None:
        return None
    try:
        return version(distribution or package)
    except PackageNotFoundError:
        return ""


@cache
def has_nvcc() -> bool:
    """Return whether the CUDA compiler is here, which tilelang compiles its kernels with."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if shutil.which("nvcc") or any(home and Path(home, "bin", "nvcc").exists() for home in homes):
        return True
    try:
        return bool(version("nvidia-cuda-nvcc"))
    except PackageNotFoundError:
        return False


def _needs_cuda_half(request: OpRequest) -> str | None:
    if request.device.type != "cuda":
        return f"needs a CUDA device, the tensors are on {request.device.type}"
    if request.dtype not in _HALF:
        return f"its kernels are for bfloat16 and float16, not {str(request.dtype).removeprefix('torch.')}"
    return None


def _needs_package(package: str, distribution: str) -> str | None:
    return None if installed(package, distribution) is not None else f"the package {distribution} is not installed"


def _refuse_fla(request: OpRequest) -> str | None:
    return _needs_package("fla", "flash-linear-attention") or _needs_cuda_half(request)


def _refuse_fla_delta(request: OpRequest) -> str | None:
    return _refuse_fla(request) or _own_chunks(request) or (_triton_trap(request) if request.grad else None)


def _refuse_fla_step(request: OpRequest) -> str | None:
    return _refuse_fla(request) or ("its recurrent kernel has no backward" if request.grad else None)


def _own_chunks(request: OpRequest) -> str | None:
    if request.sizes.get("chunk_size", False):
        return "the kernel's chunk size is its own, leave chunk_size=None"
    return None


def _triton_trap(request: OpRequest) -> str | None:
    """Return why fla has no backward, or None: Hopper with triton 3.4.0 to 3.7.0, without tilelang and FlashQLA."""
    if torch.cuda.get_device_capability(request.device)[0] != 9:
        return None
    triton = installed("triton") or "0"
    numbers = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in triton.split("+")[0].split(".")[:3])
    if not (3, 4, 0) <= numbers < (3, 7, 1):
        return None
    if installed("tilelang") is not None and os.environ.get("FLA_TILELANG") != "0" and has_nvcc():
        return None
    if _refuse_flash_qla(request) is None:
        return None
    return f"no backward on Hopper with triton {triton}: install tilelang (with nvcc) or flash-qla, or triton 3.7.1"


def _refuse_flash_qla(request: OpRequest) -> str | None:
    if os.environ.get("FLA_FLASH_QLA") == "0":
        return "FLA_FLASH_QLA=0 turns it off"
    reason = _needs_package("flash_qla", "flash-qla") or _needs_cuda_half(request) or _own_chunks(request)
    if reason:
        return reason
    if torch.cuda.get_device_capability(request.device)[0] != 9:
        return "used here on Hopper (compute capability 9.x) only"
    if request.sizes.get("key_dim", 128) != 128 or request.sizes.get("value_dim", 128) != 128:
        return f"needs key and value dim 128, got {request.sizes['key_dim']} and {request.sizes['value_dim']}"
    return None


def _refuse_causal_conv1d(request: OpRequest) -> str | None:
    reason = _needs_package("causal_conv1d", "causal-conv1d") or _needs_cuda_half(request)
    if reason:
        return reason
    if request.sizes.get("kernel", 4) not in (2, 3, 4):
        return f"its kernels have 2 to 4 taps, not {request.sizes['kernel']}"
    if request.sizes.get("dim", 8) % 8:
        return f"needs a multiple of 8 channels, got {request.sizes['dim']}"
    if request.sizes.get("state", False):
        return "does not take an initial state for packed sequences"
    return None


def _refuse_varlen(request: OpRequest) -> str | None:
    reason = _needs_cuda_half(request)
    if reason:
        return reason
    if find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    if torch.cuda.get_device_capability(request.device)[0] < 8:
        return "flash attention needs compute capability 8.0 or newer"
    dim = request.sizes.get("head_dim", 128)
    if dim > 256 or dim % 8:
        return f"flash attention needs a head dim that is a multiple of 8 and at most 256, got {dim}"
    return None


_TABLE: dict[str, dict[str, _Backend]] = {
    "causal_conv1d": {
        "causal_conv1d": _Backend("seqpack.ops.fused:causal_conv1d_package", _refuse_causal_conv1d),
        "fla": _Backend("seqpack.ops.fused:causal_conv1d_fla", _refuse_fla),
        "torch": _Backend("seqpack.ops.conv:causal_conv1d_torch", _accept),
        "naive": _Backend("seqpack.ops.conv:causal_conv1d_naive", _accept, automatic=False),
    },
    "gated_delta_rule": {
        "flash_qla": _Backend("seqpack.ops.fused:gated_delta_rule_flash_qla", _refuse_flash_qla),
        "fla": _Backend("seqpack.ops.fused:gated_delta_rule_fla", _refuse_fla_delta),
        "torch": _Backend("seqpack.ops.delta_rule:gated_delta_rule_torch", _accept),
        "naive": _Backend("seqpack.ops.delta_rule:gated_delta_rule_naive", _accept, automatic=False),
    },
    "gated_delta_rule_step": {
        "fla": _Backend("seqpack.ops.fused:gated_delta_rule_step_fla", _refuse_fla_step),
        "torch": _Backend("seqpack.ops.delta_rule:gated_delta_rule_step_torch", _accept),
    },
    "attention": {
        "varlen": _Backend("seqpack.ops.fused:attention_varlen", _refuse_varlen),
        "torch": _Backend("seqpack.ops.varlen_attention:attention_torch", _accept),
        "naive": _Backend("seqpack.ops.varlen_attention:attention_naive", _accept, automatic=False),
    },
}


def choose(request: OpRequest, backend: str = "auto") -> Callable[..., Any]:
    """Return the implementation that runs the request.

    "auto" takes the first fused backend that can run it, else plain torch.

    Raises:
        ValueError: the backend is unknown, or cannot run this call; the text has the reason.
    """
    table = _TABLE[request.op]
    if backend == "auto":
        return next(b for b in table.values() if b.automatic and b.refuse(request) is None).load()
    if backend not in table:
        raise ValueError(f"{request.op} has no backend {backend!r}; choose from {', '.join(['auto', *table])}")
    reason = table[backend].refuse(request)
    if reason:
        raise ValueError(f"{request.op} cannot run with backend {backend!r}: {reason}; use backend='auto'")
    return table[backend].load()


def backends(
    device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> dict[str, dict[str, Availability]]:
    """Report, for every operation, which backends can run on a device and why the others cannot.

    Args:
        device: the device asked about; CUDA where there is one, else the CPU.
        dtype: bfloat16 on CUDA and float32 elsewhere, where None.

    Returns:
        {operation: {backend: Availability}}, in the order in which "auto" tries them. The answer is for training
        (decoding for the step) with common sizes (head dim 128, kernel 4); other sizes may still be refused.
    """
    place = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    kind = dtype or (torch.bfloat16 if place.type == "cuda" else torch.float32)
    report: dict[str, dict[str, Availability]] = {}
    for op, table in _TABLE.items():
        request = OpRequest(op, place, kind, not op.endswith("_step"), {})
        reasons = {name: entry.refuse(request) for name, entry in table.items()}
        report[op] = {
            name: Availability(reason is None, reason or ("only when asked for" if not table[name].automatic else ""))
            for name, reason in reasons.items()
        }
    return report

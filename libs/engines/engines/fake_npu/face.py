"""`torch_npu` as its wheel describes it, over the stand-in's library.

What the wheel does not have is an AttributeError, an argument that it does not take a TypeError (a RuntimeError of
torch's for operators), and what it has and the stand-in does not a NotImplementedError.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from engines.fake_npu import runtime
from engines.fake_npu.build import load_library
from engines.fake_npu.cuda_guard import refuse_cuda
from engines.fake_npu.operators import ATEN, CALLS, OPERATORS
from engines.fake_npu.surface import Surface, read_surface, signature
from engines.private_api import register_device

_kept: list[Any] = []
"""Libraries of operators, which live as long as these objects."""


class NpuModule(ModuleType):
    """torch.npu."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"torch_npu {read_surface().version} has no torch.npu.{name}")


def install() -> ModuleType:
    """Register device, operators and process group with torch, as importing torch_npu does, and return torch.npu."""
    surface, library = read_surface(), load_library()
    module = _npu_module(surface, library)
    torch.utils.rename_privateuse1_backend("npu")
    register_device("npu", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return library.ProcessGroupHCCL(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend("hccl", make, devices=["npu"])
    _kept.extend([_define_operators(surface), _wider_operators()])
    refuse_cuda()
    return module


def _npu_module(surface: Surface, library: ModuleType) -> ModuleType:
    module = NpuModule("torch.npu")
    made = runtime.functions(library) | runtime.classes()
    if unknown := sorted(made.keys() - surface.names()):
        raise AssertionError(f"the stand-in has what torch_npu does not: {unknown}")
    for name, arguments in {**surface.functions, **surface.classes}.items():
        setattr(module, name, _checked(name, arguments, made.get(name)))
    for name, value in {**runtime.private(library), "library": library}.items():
        setattr(module, name, value)
    return module


def _checked(name: str, arguments: str | None, made: Any) -> Any:
    """Return a function with the wheel's arguments; classes check their own."""
    if isinstance(made, type):
        return made
    wanted = signature(arguments or "")

    @wraps(made or _checked)
    def call(*args: Any, **kwargs: Any) -> Any:
        wanted.bind(*args, **kwargs)
        if made is None:
            raise NotImplementedError(f"torch.npu.{name} is in torch_npu, and not in the stand-in")
        return made(*args, **kwargs)

    call.__name__ = name
    return call


def _define_operators(surface: Surface) -> Any:
    library = torch.library.Library("npu", "DEF")
    for schema in surface.operators:
        library.define(schema)
    for name, plain in OPERATORS.items():
        function = _counted(name, plain)
        library.impl(name, function, "PrivateUse1")
        differentiable = name in surface.differentiable
        library.impl(name, function if differentiable else _without_gradient(name, function), "AutogradPrivateUse1")
    return library


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        return function(*args, **kwargs)

    return call


def _wider_operators() -> Any:
    library = torch.library.Library("aten", "IMPL")
    for name, function in ATEN.items():
        library.impl(name, function, "PrivateUse1")
    return library


def _without_gradient(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator without a derivative: it raises where a gradient would be lost."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [t for value in args for t in (value if isinstance(value, list | tuple) else [value])]
        if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
            raise RuntimeError(f"npu::{name} has no derivative: call it inside of a torch.autograd.Function")
        return function(*args, **kwargs)

    return call

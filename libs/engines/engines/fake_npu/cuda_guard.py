"""Errors for any call to torch.cuda while the stand-in is there, but for those of other packages."""

import sys
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import torch

OURS = ("apps", "dyncp", "engines", "objectives", "rollout", "seqpack")
"""Packages whose calls are refused. Torch and transformers ask torch.cuda.is_available() wherever they run."""


def refuse_cuda() -> None:
    """Make each function of torch.cuda raise where one of our modules calls it; once for this process."""
    for name, value in list(vars(torch.cuda).items()):
        if isinstance(value, FunctionType) and value.__module__.startswith("torch.cuda"):
            setattr(torch.cuda, name, _refusing(name, value))


def _refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(function, "__wrapped_by_stand_in__"):
        return function

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        allowed = caller == "engines.devices.cuda"  # asked whether there is one, on every machine
        if caller.partition(".")[0] in OURS and not (allowed and name == "is_available"):
            raise RuntimeError(f"torch.cuda.{name} was called on an NPU, by {caller}: ask engines.devices")
        return function(*args, **kwargs)

    call.__wrapped_by_stand_in__ = True  # type: ignore[attr-defined]
    return call

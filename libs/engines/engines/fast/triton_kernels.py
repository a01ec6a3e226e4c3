"""Triton's kernels: modules that are imported on the first use on a GPU, never on a CPU."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def has_triton() -> bool:
    """Return whether Triton is installed."""
    return find_spec("triton") is not None


@cache
def triton_module(name: str) -> ModuleType:
    """Import `engines.fast.NAME`, a module of Triton kernels."""
    return import_module(f"engines.fast.{name}")

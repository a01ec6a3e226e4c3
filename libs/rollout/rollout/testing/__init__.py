"""For tests of environments and apps: a scripted engine, a tiny model and tokenizer, pieces of given tensors."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.testing.scripted import ScriptedEngine as ScriptedEngine

_EXPORTS = {"ScriptedEngine": "rollout.testing.scripted"}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    """Import the module that holds `name` on first use."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(_EXPORTS)

"""Is a packed row the same as its sequences alone? And the properties that tests of the operations share."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqpack.testing.account import IsolationReport as IsolationReport
    from seqpack.testing.account import Tolerance as Tolerance
    from seqpack.testing.isolation import assert_packing_isolated as assert_packing_isolated
    from seqpack.testing.isolation import check_packing as check_packing

_EXPORTS = {
    "IsolationReport": "seqpack.testing.account",
    "Tolerance": "seqpack.testing.account",
    "assert_packing_isolated": "seqpack.testing.isolation",
    "check_packing": "seqpack.testing.isolation",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    """Import the module that holds `name` on first use."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(_EXPORTS)

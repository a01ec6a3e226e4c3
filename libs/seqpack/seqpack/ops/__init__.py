"""Packed operations of one rank: causal convolution, gated delta rule, attention, and their decode steps."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqpack.ops.conv import causal_conv1d as causal_conv1d
    from seqpack.ops.conv import causal_conv1d_state as causal_conv1d_state
    from seqpack.ops.conv import causal_conv1d_step as causal_conv1d_step
    from seqpack.ops.delta_rule import gated_delta_rule as gated_delta_rule
    from seqpack.ops.delta_rule import gated_delta_rule_step as gated_delta_rule_step
    from seqpack.ops.probe import backends as backends
    from seqpack.ops.rows import by_rows as by_rows
    from seqpack.ops.varlen_attention import attention as attention

_EXPORTS = {
    "attention": "seqpack.ops.varlen_attention",
    "backends": "seqpack.ops.probe",
    "by_rows": "seqpack.ops.rows",
    "causal_conv1d": "seqpack.ops.conv",
    "causal_conv1d_state": "seqpack.ops.conv",
    "causal_conv1d_step": "seqpack.ops.conv",
    "gated_delta_rule": "seqpack.ops.delta_rule",
    "gated_delta_rule_step": "seqpack.ops.delta_rule",
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

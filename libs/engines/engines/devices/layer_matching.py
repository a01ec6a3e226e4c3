"""Rules for which modules of registered models are norms and gated MLPs, and how an instance gets another forward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm")
CENTERED_NORMS = ("Gemma3RMSNorm", "Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")
"""Norms whose weight is kept as its distance from one."""
GATED_NORMS = ("Qwen3NextRMSNormGated", "Qwen3_5RMSNormGated", "Qwen3_5MoeRMSNormGated")
MLPS = (
    *("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "Qwen3MoeMLP"),
    *("Qwen3NextMLP", "Qwen3_5MLP", "Qwen3_5MoeMLP"),
)
Forward = Callable[..., Any]


@dataclass(frozen=True)
class Forwards:
    """The replacements of a module's forward, by its kind; None: it keeps its own."""

    norm: Forward
    centered_norm: Forward
    gated_norm: Forward
    mlp: Forward | None = None

    def of(self, module: nn.Module) -> Forward | None:
        """Return the forward that replaces a module's own; None where it keeps its own."""
        name = type(module).__name__
        if name in NORMS:
            return self.norm
        if name in CENTERED_NORMS:
            return self.centered_norm
        if name in GATED_NORMS and getattr(module, "activation", "silu") == "silu":
            return self.gated_norm
        if name in MLPS and is_silu(module):
            return self.mlp
        return None


def is_silu(module: Any) -> bool:
    """Return whether a module's `act_fn` is silu."""
    return isinstance(module.act_fn, nn.SiLU) or type(module.act_fn).__name__ == "SiLUActivation"


_MADE: dict[tuple[Any, Any], type[nn.Module]] = {}


def with_forward(kind: type[nn.Module], forward: Forward) -> type[nn.Module]:
    """Return a subclass of the same name with another forward; the same class for the same pair."""
    if (kind, forward) not in _MADE:
        members = {"forward": forward, "__module__": kind.__module__}
        _MADE[kind, forward] = type(kind.__name__, (kind,), members)
    return _MADE[kind, forward]

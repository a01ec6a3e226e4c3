"""The compiled parts of a model, by what `engines.fast.support` answered: its layers, and the head's log-probs."""

from collections.abc import Callable
from typing import Any

from engines.capability import Supported, Unsupported
from engines.families.registry import family_of
from engines.fast.fused_log_probs import fused_log_probs
from engines.fast.layers import use_layer_functions
from engines.fast.support import TRACED
from engines.fast.traced_layers import use_traced_layers
from engines.scoring.log_probs import token_log_probs


def compile_layers(model: Any, compiled: Supported) -> None:
    """Compile the decoder layers of a model that is adapted for packing: as functions, or as they are."""
    if compiled == TRACED:
        use_traced_layers(model)
    else:
        use_layer_functions(model)


def log_probs_by(compiled: Supported | Unsupported, config: Any) -> Callable[..., Any]:
    """Return the function of log-probs: over fused kernels beside compiled layers, where logits have no soft cap."""
    fused = compiled and family_of(config).soft_cap(config) is None
    return fused_log_probs if fused else token_log_probs

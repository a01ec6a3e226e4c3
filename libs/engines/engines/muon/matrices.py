"""Which parameters are matrices that Muon updates: those of the decoder layers' linear maps and experts.

Not the embedding and the head, whose rows are tokens' own, nor norms, biases, convolutions and what has one row or
column: AdamW updates these, and all of a vision tower.
"""

from typing import Any

from torch import nn

from engines.config import EngineConfig
from engines.families.registry import family_of


def muon_matrices(config: EngineConfig, model: Any) -> frozenset[str]:
    """Return the names of the model's trained parameters that Muon updates; none where the configuration has AdamW."""
    if config.optimizer != "muon":
        return frozenset()
    inside = {module for layer in family_of(model.config).layers(model) for module in layer.modules()}
    return frozenset(
        f"{name}.{own}" if name else own
        for name, module in model.named_modules()
        if module in inside and not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding))
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad and parameter.ndim in (2, 3) and min(parameter.shape[-2:]) > 1
    )

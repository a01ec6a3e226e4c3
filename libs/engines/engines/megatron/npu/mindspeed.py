"""MindSpeed's patches of megatron-core for Ascend NPUs: unverified, and applied by nobody but who asks for them.

The package index has a placeholder of that name alone, so that nothing of MindSpeed ran here. What is held by tests is
ours: that they are refused unless accepted by name, that they come before model-parallel groups are made, that a
failure is reported with nothing changed, that applied twice they are applied once, and that they can be undone.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from megatron.core import parallel_state

from engines.devices.adaptations import Adaptation, Applied, Patch, apply
from engines.devices.third_party_patches import changes_made_by

ADAPTOR = "mindspeed.megatron_adaptor"
VERSIONS = ">=0.12,<0.13"
UNVERIFIED = "the package index has a placeholder of mindspeed alone: nothing of it ran here"


def override_transformer_config(
    values: Mapping[str, Any], accept_unverified: bool = False, installed: str | None = None
) -> Applied:
    """Apply MindSpeed's patches of megatron-core for these fields of its TransformerConfig (`repatch`), and return what
    they changed. Call it before an engine is built.

    `installed`: MindSpeed's version, where its metadata do not tell. ValueError, with nothing changed: see
    `engines.devices.adaptations.apply`; model-parallel groups exist; MindSpeed fails.
    """
    return apply(_adaptation(values), accept_unverified, installed)


def _adaptation(values: Mapping[str, Any]) -> Adaptation:
    named = ", ".join(f"{name}={value!r}" for name, value in sorted(values.items()))
    return Adaptation(
        f"MindSpeed ({named})", "mindspeed", VERSIONS, lambda: _patches(values), _too_late, unverified=UNVERIFIED
    )


def _too_late() -> str | None:
    if parallel_state.model_parallel_is_initialized():
        return "model-parallel groups exist, and were made without it: call it before an engine is built"
    return None


def _patches(values: Mapping[str, Any]) -> Sequence[Patch]:
    try:
        adaptor = import_module(ADAPTOR)
    except ImportError as error:
        raise ValueError(f"MindSpeed failed, nothing was changed: {error}") from error
    if not hasattr(adaptor, "repatch"):
        raise ValueError(f"MindSpeed failed, nothing was changed: {ADAPTOR} has no repatch")
    try:
        return changes_made_by(lambda: adaptor.repatch(dict(values)), _megatron())
    except (AttributeError, ImportError, TypeError) as error:
        raise ValueError(f"MindSpeed failed, nothing was changed: {type(error).__name__}: {error}") from error


def _megatron() -> list[ModuleType]:
    """Return the modules of megatron-core that are loaded."""
    return [module for name, module in list(sys.modules.items()) if name.startswith("megatron.core") and module]

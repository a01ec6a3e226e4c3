"""Advantages, losses, KL estimators and off-policy weights on packed tokens, and the objectives made of them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from objectives import advantages as advantages
    from objectives import kl as kl
    from objectives import losses as losses
    from objectives import off_policy as off_policy
    from objectives.distillation import Distillation as Distillation
    from objectives.grpo import GRPO as GRPO
    from objectives.sft import SFT as SFT
    from seqpack.batches.objective import Objective as Objective
    from seqpack.batches.view import Totals as Totals

_MODULES = ("advantages", "kl", "losses", "off_policy")
_EXPORTS = {
    "Distillation": "objectives.distillation",
    "GRPO": "objectives.grpo",
    "SFT": "objectives.sft",
    "Objective": "seqpack.batches.objective",
    "Totals": "seqpack.batches.view",
}
__all__ = ["GRPO", "SFT", "Distillation", "Objective", "Totals", "advantages", "kl", "losses", "off_policy"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"objectives.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

"""Advantages, losses, KL estimators and off-policy weights on packed tokens, and the objectives made of them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from objectives import advantages as advantages
    from objectives import kl as kl
    from objectives import losses as losses
    from objectives import off_policy as off_policy
    from objectives.grpo import GRPO as GRPO
    from objectives.sft import SFT as SFT
    from seqpack.batches.objective import Objective as Objective
    from seqpack.batches.view import Totals as Totals

_EXPORTS = {
    "GRPO": "objectives.grpo",
    "SFT": "objectives.sft",
    "Objective": "seqpack.batches.objective",
    "Totals": "seqpack.batches.view",
    "advantages": "objectives.advantages",
    "kl": "objectives.kl",
    "losses": "objectives.losses",
    "off_policy": "objectives.off_policy",
}
__all__ = ["GRPO", "SFT", "Objective", "Totals", "advantages", "kl", "losses", "off_policy"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_EXPORTS[name])
    return module if module.__name__ == f"objectives.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)

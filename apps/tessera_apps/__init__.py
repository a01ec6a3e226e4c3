"""Post-training of language models as Python calls: `from tessera_apps import grpo; grpo(model=..., data=...)`.

The same runs as those of the commands `tessera-grpo`, `tessera-sft` and `tessera-plan`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apps.tessera_apps.calls import RunResult, grpo, plan, sft

_EXPORTS = {
    "RunResult": "apps.tessera_apps.calls",
    "grpo": "apps.tessera_apps.calls",
    "plan": "apps.tessera_apps.calls",
    "sft": "apps.tessera_apps.calls",
}

__all__ = ["RunResult", "grpo", "plan", "sft"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]

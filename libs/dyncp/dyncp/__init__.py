"""Context parallelism, static and dynamic: plan, split, attend, merge."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dyncp.agreement import check_same_plan as check_same_plan
    from dyncp.batches import merge_outputs as merge_outputs
    from dyncp.batches import split_batch as split_batch
    from dyncp.plan_types import DynamicPlan as DynamicPlan
    from dyncp.plan_types import Group as Group
    from dyncp.plan_types import Step as Step
    from dyncp.sizes import local_cp_size as local_cp_size

_EXPORTS = {
    "DynamicPlan": "dyncp.plan_types",
    "Group": "dyncp.plan_types",
    "Step": "dyncp.plan_types",
    "check_same_plan": "dyncp.agreement",
    "local_cp_size": "dyncp.sizes",
    "merge_outputs": "dyncp.batches",
    "split_batch": "dyncp.batches",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(_EXPORTS)

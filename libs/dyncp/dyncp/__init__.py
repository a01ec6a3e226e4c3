"""Context parallelism, static and dynamic: plan, split, attend, merge."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dyncp.agreement import check_same_plan as check_same_plan
    from dyncp.batches import merge_outputs as merge_outputs
    from dyncp.batches import split_batch as split_batch
    from dyncp.cost import CostModel as CostModel
    from dyncp.cost import Topology as Topology
    from dyncp.cp_attention import attention as attention
    from dyncp.delta_net import causal_conv1d as causal_conv1d
    from dyncp.delta_net import gated_delta_rule as gated_delta_rule
    from dyncp.layout import Sharding as Sharding
    from dyncp.plan_types import DynamicPlan as DynamicPlan
    from dyncp.plan_types import Group as Group
    from dyncp.plan_types import Step as Step
    from dyncp.planner import plan as plan
    from dyncp.planner import predicted_seconds as predicted_seconds
    from dyncp.planner import static_plan as static_plan
    from dyncp.process_groups import ProcessGroups as ProcessGroups
    from dyncp.shards import Shard as Shard
    from dyncp.shards import pack_group as pack_group
    from dyncp.shards import shard as shard
    from dyncp.shards import unshard as unshard
    from dyncp.simulation import simulate as simulate
    from dyncp.sizes import local_cp_size as local_cp_size
    from dyncp.timeline import timeline_html as timeline_html

_EXPORTS = {
    "CostModel": "dyncp.cost",
    "DynamicPlan": "dyncp.plan_types",
    "Group": "dyncp.plan_types",
    "ProcessGroups": "dyncp.process_groups",
    "Shard": "dyncp.shards",
    "Sharding": "dyncp.layout",
    "Step": "dyncp.plan_types",
    "Topology": "dyncp.cost",
    "attention": "dyncp.cp_attention",
    "causal_conv1d": "dyncp.delta_net",
    "check_same_plan": "dyncp.agreement",
    "gated_delta_rule": "dyncp.delta_net",
    "local_cp_size": "dyncp.sizes",
    "merge_outputs": "dyncp.batches",
    "pack_group": "dyncp.shards",
    "plan": "dyncp.planner",
    "predicted_seconds": "dyncp.planner",
    "shard": "dyncp.shards",
    "simulate": "dyncp.simulation",
    "split_batch": "dyncp.batches",
    "static_plan": "dyncp.planner",
    "timeline_html": "dyncp.timeline",
    "unshard": "dyncp.shards",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(_EXPORTS)

"""Context parallelism, static and dynamic: plan, split, attend, merge."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dyncp.comm.plan_hash import check_same_plan as check_same_plan
    from dyncp.comm.process_groups import ProcessGroups as ProcessGroups
    from dyncp.ops.attention import attention as attention
    from dyncp.ops.gated_delta_rule import causal_conv1d as causal_conv1d
    from dyncp.ops.gated_delta_rule import gated_delta_rule as gated_delta_rule
    from dyncp.planning.cost import CostModel as CostModel
    from dyncp.planning.cost import Topology as Topology
    from dyncp.planning.planner import plan as plan
    from dyncp.planning.planner import predicted_seconds as predicted_seconds
    from dyncp.planning.planner import static_plan as static_plan
    from dyncp.planning.simulation import simulate as simulate
    from dyncp.planning.sizes import local_cp_size as local_cp_size
    from dyncp.planning.timeline import timeline_html as timeline_html
    from dyncp.planning.types import DynamicPlan as DynamicPlan
    from dyncp.planning.types import Group as Group
    from dyncp.planning.types import Step as Step
    from dyncp.sharding.batches import merge_outputs as merge_outputs
    from dyncp.sharding.batches import split_batch as split_batch
    from dyncp.sharding.layout import Sharding as Sharding
    from dyncp.sharding.shards import Shard as Shard
    from dyncp.sharding.shards import pack_group as pack_group
    from dyncp.sharding.shards import shard as shard
    from dyncp.sharding.shards import unshard as unshard

_EXPORTS = {
    "CostModel": "dyncp.planning.cost",
    "DynamicPlan": "dyncp.planning.types",
    "Group": "dyncp.planning.types",
    "ProcessGroups": "dyncp.comm.process_groups",
    "Shard": "dyncp.sharding.shards",
    "Sharding": "dyncp.sharding.layout",
    "Step": "dyncp.planning.types",
    "Topology": "dyncp.planning.cost",
    "attention": "dyncp.ops.attention",
    "causal_conv1d": "dyncp.ops.gated_delta_rule",
    "check_same_plan": "dyncp.comm.plan_hash",
    "gated_delta_rule": "dyncp.ops.gated_delta_rule",
    "local_cp_size": "dyncp.planning.sizes",
    "merge_outputs": "dyncp.sharding.batches",
    "pack_group": "dyncp.sharding.shards",
    "plan": "dyncp.planning.planner",
    "predicted_seconds": "dyncp.planning.planner",
    "shard": "dyncp.sharding.shards",
    "simulate": "dyncp.planning.simulation",
    "split_batch": "dyncp.sharding.batches",
    "static_plan": "dyncp.planning.planner",
    "timeline_html": "dyncp.planning.timeline",
    "unshard": "dyncp.sharding.shards",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(_EXPORTS)

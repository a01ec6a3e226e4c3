"""What a run needs, and whether it is there: the engine's own answers, and a table of what the apps lack."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from apps.common.plan.cluster import changed_fields
from apps.common.plan.model_shape import count_parameters
from apps.common.plan.work import Work
from engines.capability import No, Yes, supports
from engines.families.registry import FAMILIES

GIB = 2**30
# Fields of the cluster that the engine answers for, by its features.
ENGINE_FEATURES = {
    "layout.tp": "tensor_parallel",
    "layout.etp": "tensor_parallel",
    "layout.pp": "pipeline_parallel",
    "layout.vpp": "pipeline_parallel",
    "layout.first_stage_layers": "pipeline_parallel",
    "layout.last_stage_layers": "pipeline_parallel",
    "layout.ep": "expert_parallel",
    "media.images_column": "vision",
}
# Fields, or groups of them, that nothing obeys yet.
UNOBEYED = {
    "pools.nodes": "no test has run more than one machine",
    "pools.placement": "sampling and training take turns on the same devices",
    "pools.rollout_nodes": "sampling and training take turns on the same devices",
    "pools.collective_timeout_seconds": "engines.launch starts groups with torch's own timeout",
    "rollout": "sampling has the native engine alone: a whole model on each device, no options of its own",
    "schedule": "sampling and training take turns: nothing runs ahead of the weights",
    "offload": "the apps never move weights or states to the host",
    "router": "a router is trained with the coefficients of its model's own config",
}
UNSAMPLED = No("a supervised run samples nothing: leave it at its default")
UNKNOWN_SIZE = No("the recipe does not know the model's sizes, so that nothing can be held against it: leave it out")
REFERENCE = No("the app holds no second, frozen policy to measure the KL divergence against")
RAY = No("engines.launch starts ranks in process, by spawning or under torchrun; it does not start Ray's")
IMAGES = No("prompts and conversations are text: a row with images is refused when it is read")


@dataclass(frozen=True)
class Need:
    """One thing that a run needs, and the answer."""

    feature: str
    answer: Yes | No


def needs_of(work: Work) -> list[Need]:
    """All that the run needs beyond one device and text, each with its answer."""
    changed = [path for path in changed_fields(work.cluster) if path != "environment"]
    found = [*_engine_needs(work), *(_cluster_need(work, path) for path in changed)]
    if work.cluster.media.images_column is not None:
        found.append(Need("images", IMAGES))
    if work.cluster.schedule.mode != "sync":
        found.append(Need("ray", RAY))
    if work.reference_policy:
        found.append(Need("reference policy", REFERENCE))
    return [*found, *_loading(work)]


def missing_variables(environment: tuple[str, ...], environ: Mapping[str, str]) -> list[str]:
    """Return the NAME=value entries that are not in `environ`."""
    return [entry for entry in environment if environ.get(entry.partition("=")[0]) != entry.partition("=")[2]]


def _engine_needs(work: Work) -> list[Need]:
    engine, shape = work.engine, work.origin.shape if work.origin else None
    asked: list[str] = [engine.backend, engine.batching]
    asked += [engine.device] if engine.device != "auto" else []
    asked += ["context_parallel"] if engine.context_parallel not in ("off", "static:1") else []
    asked += ["gradient_checkpointing"] if engine.gradient_checkpointing else []
    asked += ["moe"] if shape is not None and shape.experts else []
    found = [Need(feature, supports(engine, feature)) for feature in asked]
    return found if shape is None else [*found, Need(f"family {shape.model_type}", _family(shape.model_type))]


def _family(model_type: str) -> Yes | No:
    known = {kind: family.name for family in FAMILIES for kind in family.model_types}
    if model_type in known:
        return Yes(f"engines/families/{known[model_type]}.py")
    return No(f"no family of engines has it; there are {', '.join(sorted(known))}")


def _cluster_need(work: Work, path: str) -> Need:
    feature = f"--cluster.{path.replace('_', '-')} {_value(work.cluster, path)}"
    if path in ENGINE_FEATURES:
        return Need(feature, supports(work.engine, ENGINE_FEATURES[path]))
    if path == "pools.device_memory_gib":
        return Need(feature, UNKNOWN_SIZE if work.origin is None else Yes("the plan's memory is held against it"))
    if work.app == "sft" and path.split(".")[0] in ("rollout", "schedule"):
        return Need(feature, UNSAMPLED)
    parts = path.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return Need(feature, No(next(UNOBEYED[name] for name in names if name in UNOBEYED)))


def _loading(work: Work) -> list[Need]:
    """FSDP2's weights are whole on each device before they are sharded."""
    memory = work.cluster.pools.device_memory_gib
    if work.origin is None or memory is None or work.engine.backend != "fsdp2":
        return []
    needed = count_parameters(work.origin.shape).total * 4 / GIB
    if needed < memory:
        return [Need("loading", Yes("the whole model in float32 fits a device"))]
    reason = f"each device first holds the whole model in float32, {needed:.0f} GiB, before it is sharded"
    return [Need("loading", No(reason))]


def _value(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = getattr(config, part)
    return config

"""What a run needs, and whether it is there: the engine's own answers, and a table of what the apps lack."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from apps.common.cluster import changed_fields
from apps.common.plan.work import Work
from engines.capability import No, Yes, features_of, supports
from engines.families.registry import FAMILIES
from rollout import RolloutConfig
from rollout.capability import supports as sampler_supports

# Fields, or groups of them, that nothing obeys yet.
UNOBEYED = {
    "pools.nodes": "no test has run more than one machine",
    "pools.placement": "sampling on nodes of its own is Ray's: say --cluster.rollout.ray-workers",
    "pools.rollout_nodes": "sampling on nodes of its own is Ray's: say --cluster.rollout.ray-workers",
    "rollout": "the native engine holds a whole model on each device and has no options of its own",
}
# Fields of the sampler that vLLM answers for, by rollout's features.
VLLM_FEATURES = {"rollout.tp": "tensor_parallel", "rollout.dp": "data_parallel", "rollout.ep": "expert_parallel"}
# What vLLM is told, and what it can't be told yet.
VLLM_FIELDS: dict[str, Yes | No] = {
    "rollout.max_model_tokens": Yes("RolloutConfig.max_length"),
    "rollout.max_batched_tokens": Yes("RolloutConfig.prefill_tokens"),
    "rollout.memory_share": Yes("rollout/vllm/graphs_gpu_test.py"),
    "rollout.copies_per_device": Yes("apps/grpo/benchmarks/step_with_vllm.py"),
    "rollout.weights_on_device": Yes("rollout/vllm/shared_device_gpu_test.py"),
    "rollout.sleep": Yes("apps/grpo/tests/sleep_vllm_test.py"),
    "rollout.chunked_prefill": Yes("rollout/vllm/parts_test.py"),
    "rollout.prefix_cache": Yes("rollout/vllm/parts_test.py"),
    "rollout.dtype": Yes("VllmConfig.dtype"),
    "rollout.device": Yes("apps/grpo/tests/shrink_npu_vllm_test.py"),
    "rollout.max_requests": Yes("RolloutConfig.max_batch"),
    "rollout.vllm": Yes("VllmConfig.arguments"),
    "rollout.cuda_graph_sizes": Yes("rollout/vllm/graphs_gpu_test.py"),
    "rollout.admit": No("vLLM lets requests begin as it sees fit: leave it out"),
}
EXPERTS_OF_COPIES = No(
    "experts over the copies of the model in vLLM (--cluster.rollout.dp) ran on a CPU alone, no accelerator has run it:"
    " set --cluster.rollout.device cpu, or have each copy hold all experts, over its own workers: set ep to tp"
)
EXPERTS_OF_COPIES_ON_A_CPU = Yes("rollout/vllm/experts_over_copies_test.py")
SHARED_BY_WORKERS = No(
    "copies of several workers each, or that share experts, never shared a device: set --cluster.rollout.tp 1 and ep 1,"
    " or leave it out"
)
UNSAMPLED = No("a supervised run samples nothing: leave it at its default")
UNKNOWN_SIZE = No("the recipe does not know the model's sizes, so that nothing can be held against it: leave it out")
OFFLOAD = Yes("apps/grpo/tests/offload_test.py::test_training_is_on_the_host_while_answers_are_sampled")
OVERLAP = No(
    "sampling and training overlap, on devices of their own: leave it out, or use --cluster.schedule.mode sync"
)
REFERENCE = Yes("apps/grpo/tests/lora_test.py::test_the_policy_is_held_to_a_frozen_model_beside_it")
RAY = No("engines.launch starts ranks in process, by spawning or under torchrun; it does not start Ray's")
RAY_GPUS = Yes("apps/grpo/tests/ray_gpu_test.py")
RAY_SAMPLERS = Yes("apps/grpo/tests/schedule_ray_test.py")
RAY_SLEEP = No("vLLM in Ray's workers never slept between two rounds: set --cluster.rollout.no-sleep")
RAY_APART = Yes("apps/grpo/tests/ray_pools_test.py")
RAYS = ("rollout.ray_", "rollout.weight_transport")
"""Beginnings of the fields that Ray's samplers alone obey."""
APART = ("pools.placement", "pools.rollout_nodes")
RAY_VLLM = Yes("apps/grpo/tests/schedule_vllm_ray_test.py")
ADMIT = Yes("apps/grpo/sampling/native_test.py")
ADMIT_ROUNDS = No("the samplers of fully_async let requests begin at any step: leave it out, or use another schedule")
DENSE = No("the model has no router, and no token is sent to experts: leave --engine.routing-replay out")
NOTHING_TO_REPLAY = No("a supervised run has no sampler whose experts it could replay: leave it out")
IMAGES = Yes("apps/grpo/tests/images_test.py::test_a_column_of_images_may_have_any_name")
UNSEEN = No("the model is trained on text: set --engine.vision to frozen or trained")


@dataclass(frozen=True)
class Need:
    """One thing that a run needs, and the answer."""

    feature: str
    answer: Yes | No


def needs_of(work: Work) -> list[Need]:
    """Return all that the run needs beyond one device and text, each with its answer."""
    changed = [path for path in changed_fields(work.cluster) if path != "environment"]
    found = [*_engine_needs(work), *(_cluster_need(work, path) for path in changed)]
    if work.cluster.schedule.mode != "sync":
        found += _schedule(work)
    if work.engine.vision != "off" and work.app == "grpo":
        sampler = RolloutConfig(backend=work.cluster.rollout.engine)
        found.append(Need("images shown to the sampler", sampler_supports(sampler, "media")))
    rollout = work.cluster.rollout
    if work.engine.device == "npu" and (rollout.engine, rollout.device) == ("vllm", "auto") and work.app == "grpo":
        found.append(Need("vLLM beside NPUs", sampler_supports(RolloutConfig(backend="vllm"), "npu")))
    if work.engine.routing_replay:
        found += _replay(work)
    if work.reference_policy:
        found.append(Need("reference policy", REFERENCE))
    return found


def missing_variables(environment: tuple[str, ...], environ: Mapping[str, str]) -> list[str]:
    """Return the NAME=value entries that are not in `environ`."""
    return [entry for entry in environment if environ.get(entry.partition("=")[0]) != entry.partition("=")[2]]


def _engine_needs(work: Work) -> list[Need]:
    engine, shape = work.engine, work.origin.shape if work.origin else None
    asked = features_of(engine)
    asked += ["moe"] if shape is not None and shape.experts else []
    found = [Need(feature, supports(engine, feature)) for feature in asked]
    return found if shape is None else [*found, Need(f"family {shape.model_type}", _family(shape.model_type))]


def _replay(work: Work) -> list[Need]:
    """Return of what replays a sampler's experts: the model's router, as far as its sizes are known, and a sampler."""
    if work.app == "sft":
        return [Need("--engine.routing-replay (experts to replay)", NOTHING_TO_REPLAY)]
    if has_experts(work) is False:
        return [Need("--engine.routing-replay (experts to replay)", DENSE)]
    sampler = RolloutConfig(backend=work.cluster.rollout.engine)
    return [Need("--engine.routing-replay (experts to replay)", sampler_supports(sampler, "routed_experts"))]


def has_experts(work: Work) -> bool | None:
    """Return whether tokens of the run's model are sent to experts; None where the model is not known before it is
    read."""
    if work.origin is not None:
        return work.origin.shape.experts > 0
    for family in FAMILIES:
        if work.model_type in (*family.model_types, *family.wrappers):
            return bool(family.router)
    return None


def _family(model_type: str) -> Yes | No:
    known = {kind: family.name for family in FAMILIES for kind in family.model_types}
    if model_type in known:
        return Yes(f"engines/families/{known[model_type]}.py")
    return No(f"no family of engines has it; there are {', '.join(sorted(known))}")


def _cluster_need(work: Work, path: str) -> Need:
    feature = f"--cluster.{path.replace('_', '-')} {_value(work.cluster, path)}"
    if path == "media.images_column":
        return Need(feature, _images(work))
    if path == "pools.device_memory_gib":
        return Need(feature, UNKNOWN_SIZE if work.origin is None else Yes("the plan's memory is held against it"))
    if work.app == "sft" and path.split(".")[0] in ("rollout", "schedule", "offload"):
        return Need(feature, UNSAMPLED)
    if path == "offload":
        return Need(feature, OFFLOAD if work.cluster.schedule.mode == "sync" else OVERLAP)
    if work.cluster.rollout.engine == "vllm" and path.startswith("rollout.") and not path.startswith(RAYS):
        layout = work.cluster.rollout
        if path == "rollout.sleep" and layout.ray_workers:
            return Need(feature, RAY_SLEEP)
        if path == "rollout.sleep" and work.cluster.schedule.mode != "sync":
            return Need(feature, OVERLAP)
        if path == "rollout.copies_per_device" and (layout.tp > 1 or layout.experts_over_copies):
            return Need(feature, SHARED_BY_WORKERS)
        return Need(feature, _vllm_experts(work) if path == "rollout.ep" else _vllm(path))
    if work.cluster.rollout.engine == "openai" and path.startswith("rollout."):
        return Need(feature, sampler_supports(RolloutConfig(backend="openai"), "two_phase_weights"))
    if path == "rollout.ray_gpus" or (path, work.cluster.rollout.weight_transport) == (RAYS[1], "nccl"):
        return Need(feature, RAY_GPUS)
    if path.startswith(RAYS):
        return Need(feature, RAY_VLLM if work.cluster.rollout.engine == "vllm" else RAY_SAMPLERS)
    if path == "rollout.admit":
        ahead = work.cluster.schedule.mode == "fully_async" and work.cluster.rollout.admit == "rounds"
        return Need(feature, ADMIT_ROUNDS if ahead else ADMIT)
    parts = path.split(".")
    if path in APART and work.cluster.rollout.ray_workers:
        return Need(feature, RAY_APART)
    if parts[0] == "schedule":
        return Need(feature, Yes("apps/grpo/tests/schedules_test.py"))
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return Need(feature, No(next(UNOBEYED[name] for name in names if name in UNOBEYED)))


def _vllm_experts(work: Work) -> Yes | No:
    if not work.cluster.rollout.experts_over_copies:
        return _vllm("rollout.ep")
    on_a_cpu = "cpu" in (work.cluster.rollout.device, work.engine.device)
    return EXPERTS_OF_COPIES_ON_A_CPU if on_a_cpu else EXPERTS_OF_COPIES


def _vllm(path: str) -> Yes | No:
    if path in VLLM_FIELDS:
        return VLLM_FIELDS[path]
    return sampler_supports(RolloutConfig(backend="vllm"), VLLM_FEATURES.get(path, "vllm"))


def _images(work: Work) -> Yes | No:
    return UNSEEN if work.engine.vision == "off" else IMAGES


def _schedule(work: Work) -> list[Need]:
    """Return a thread of each rank samples one step ahead; fully asynchronous is one sampling process beside all
    ranks."""
    return [Need("ray", RAY)] if work.cluster.pools.nodes > 1 else []


def _value(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = getattr(config, part)
    return config

"""The requirements of a run, and whether they are met: the engine's own answers, and a table of what the apps lack."""

from dataclasses import dataclass
from typing import Any, get_args

from engines.capability import Supported, Unsupported, features_of, supports
from engines.families.registry import FAMILIES
from rollout import RolloutConfig
from rollout.capability import supports as sampler_supports
from rollout.config import Backend
from runplan.run_spec import RunSpec

# Fields, or groups of them, that have no effect yet.
UNSUPPORTED_SETTINGS = {
    "pools.nodes": "no test has run more than one machine",
    "pools.placement": "sampling on nodes of its own is Ray's: say --rollout.ray-workers",
    "pools.rollout_nodes": "sampling on nodes of its own is Ray's: say --rollout.ray-workers",
    "rollout": "the native engine holds a whole model on each device and has no options of its own",
}
# Fields of the sampler that vLLM answers for, by rollout's features.
VLLM_FEATURES = {"rollout.tp": "tensor_parallel", "rollout.dp": "data_parallel", "rollout.ep": "expert_parallel"}
# Settings of vLLM, and those that it can't have yet.
VLLM_FIELDS: dict[str, Supported | Unsupported] = {
    "rollout.max_model_tokens": Supported("RolloutConfig.max_length"),
    "rollout.max_batched_tokens": Supported("RolloutConfig.prefill_tokens"),
    "rollout.memory_share": Supported("rollout/vllm/graphs_gpu_test.py"),
    "rollout.copies_per_device": Supported("apps/grpo/benchmarks/step_with_vllm.py"),
    "rollout.weights_on_device": Supported("rollout/vllm/shared_device_gpu_test.py"),
    "rollout.sleep": Supported("apps/grpo/tests/sleep_vllm_test.py"),
    "rollout.chunked_prefill": Supported("rollout/vllm/parts_test.py"),
    "rollout.prefix_cache": Supported("rollout/vllm/parts_test.py"),
    "rollout.dtype": Supported("VllmConfig.dtype"),
    "rollout.device": Supported("apps/grpo/tests/shrink_npu_vllm_test.py"),
    "rollout.max_requests": Supported("RolloutConfig.max_batch"),
    "rollout.vllm": Supported("VllmConfig.arguments"),
    "rollout.cuda_graph_sizes": Supported("rollout/vllm/graphs_gpu_test.py"),
    "rollout.admit": Unsupported("vLLM lets requests begin as it sees fit: leave it out"),
}
EXPERTS_OF_COPIES = Unsupported(
    "experts over the copies of the model in vLLM (--rollout.dp) ran on a CPU alone, no accelerator has run it:"
    " set --rollout.device cpu, or have each copy hold all experts, over its own workers: set ep to tp"
)
EXPERTS_OF_COPIES_ON_A_CPU = Supported("rollout/vllm/experts_over_copies_test.py")
SHARED_BY_WORKERS = Unsupported(
    "copies of several workers each, or that share experts, never shared a device: set --rollout.tp 1 and ep 1,"
    " or leave it out"
)
NO_SAMPLING = Unsupported("a supervised run samples nothing: leave it at its default")
UNKNOWN_SIZE = Unsupported(
    "the recipe does not know the model's sizes, so that nothing can be held against it: leave it out"
)
OFFLOAD = Supported("apps/grpo/tests/offload_test.py::test_training_is_on_the_host_while_answers_are_sampled")
OVERLAP = Unsupported(
    "sampling and training overlap, on devices of their own: leave it out, or use --schedule.mode sync"
)
REFERENCE = Supported("apps/grpo/tests/lora_test.py::test_the_policy_is_held_to_a_frozen_model_beside_it")
RAY = Unsupported("engines.launch starts ranks in process, by spawning or under torchrun; it does not start Ray's")
RAY_GPUS = Supported("apps/grpo/tests/ray_gpu_test.py")
RAY_SAMPLERS = Supported("apps/grpo/tests/schedule_ray_test.py")
RAY_SLEEP = Unsupported("vLLM in Ray's workers never slept between two rounds: set --rollout.no-sleep")
RAY_APART = Supported("apps/grpo/tests/ray_pools_test.py")
RAYS = ("rollout.ray_", "rollout.weight_transport")
"""Prefixes of the fields that only Ray's samplers obey."""
APART = ("pools.placement", "pools.rollout_nodes")
RAY_VLLM = Supported("apps/grpo/tests/schedule_vllm_ray_test.py")
ADMIT = Supported("apps/grpo/sampling/native_test.py")
ADMIT_ROUNDS = Unsupported(
    "the samplers of fully_async let requests begin at any step: leave it out, or use another schedule"
)
DENSE = Unsupported("the model has no router, and no token is sent to experts: leave --engine.routing-replay out")
NOTHING_TO_REPLAY = Unsupported("a supervised run has no sampler whose experts it could replay: leave it out")
SAMPLERS = {name: RolloutConfig(backend=name) for name in get_args(Backend)}
"""Samplers that rollout answers for."""
OTHER_SAMPLER = Supported("the sampler checks its own settings")
IMAGES = Supported("apps/grpo/tests/images_test.py::test_a_column_of_images_may_have_any_name")
NO_VISION = Unsupported("the model is trained on text: set --engine.vision to frozen or trained")


@dataclass(frozen=True)
class Requirement:
    """One requirement of a run, and the answer."""

    feature: str
    answer: Supported | Unsupported


def requirements(spec: RunSpec) -> list[Requirement]:
    """Return all requirements of the run beyond one device and text, each with its answer."""
    changed = [(path, value) for path, value in spec.cluster.changed if path != "env"]
    every = [*_engine_requirements(spec), *(_cluster_requirement(spec, path, value) for path, value in changed)]
    if spec.cluster.schedule.mode != "sync":
        every += _schedule(spec)
    if spec.engine.vision != "off" and spec.app == "grpo":
        every.append(Requirement("images shown to the sampler", _sampler(spec, "media")))
    rollout = spec.cluster.rollout
    if spec.engine.device == "npu" and (rollout.engine, rollout.device) == ("vllm", "auto") and spec.app == "grpo":
        every.append(Requirement("vLLM beside NPUs", _sampler(spec, "npu")))
    if spec.engine.routing_replay:
        every += _replay(spec)
    if spec.reference_policy:
        every.append(Requirement("reference policy", REFERENCE))
    return every


def _engine_requirements(spec: RunSpec) -> list[Requirement]:
    engine, shape = spec.engine, spec.origin.shape if spec.origin else None
    features = features_of(engine)
    features += ["moe"] if shape is not None and shape.experts else []
    every = [Requirement(feature, supports(engine, feature)) for feature in features]
    return every if shape is None else [*every, Requirement(f"family {shape.model_type}", _family(shape.model_type))]


def _replay(spec: RunSpec) -> list[Requirement]:
    """Return the requirements of routing replay: a router, as far as the model is known, and a sampler."""
    if spec.app == "sft":
        return [Requirement("--engine.routing-replay (experts to replay)", NOTHING_TO_REPLAY)]
    if has_experts(spec) is False:
        return [Requirement("--engine.routing-replay (experts to replay)", DENSE)]
    return [Requirement("--engine.routing-replay (experts to replay)", _sampler(spec, "routed_experts"))]


def has_experts(spec: RunSpec) -> bool | None:
    """Return whether the run's model has experts; None where that is unknown before the model is read."""
    if spec.origin is not None:
        return spec.origin.shape.experts > 0
    for family in FAMILIES:
        if spec.model_type in (*family.model_types, *family.wrappers):
            return bool(family.router)
    return None


def _family(model_type: str) -> Supported | Unsupported:
    known = {kind: family.name for family in FAMILIES for kind in family.model_types}
    if model_type in known:
        return Supported(f"engines/families/{known[model_type]}.py")
    return Unsupported(f"no family of engines has it; there are {', '.join(sorted(known))}")


def _cluster_requirement(spec: RunSpec, path: str, value: Any) -> Requirement:
    feature = f"--{path.replace('_', '-')} {value}"
    if path == "media.images_column":
        return Requirement(feature, _images(spec))
    if path == "pools.device_memory_gib":
        return Requirement(
            feature, UNKNOWN_SIZE if spec.origin is None else Supported("the plan's memory is held against it")
        )
    if spec.app == "sft" and path.split(".")[0] in ("rollout", "schedule", "offload"):
        return Requirement(feature, NO_SAMPLING)
    if path == "offload":
        return Requirement(feature, OFFLOAD if spec.cluster.schedule.mode == "sync" else OVERLAP)
    if spec.cluster.rollout.engine == "vllm" and path.startswith("rollout.") and not path.startswith(RAYS):
        layout = spec.cluster.rollout
        if path == "rollout.sleep" and layout.ray_workers:
            return Requirement(feature, RAY_SLEEP)
        if path == "rollout.sleep" and spec.cluster.schedule.mode != "sync":
            return Requirement(feature, OVERLAP)
        if path == "rollout.copies_per_device" and (layout.tp > 1 or layout.experts_over_copies):
            return Requirement(feature, SHARED_BY_WORKERS)
        return Requirement(feature, _vllm_experts(spec) if path == "rollout.ep" else _vllm(path))
    if spec.cluster.rollout.engine == "openai" and path.startswith("rollout."):
        return Requirement(feature, _sampler(spec, "two_phase_weights"))
    if spec.cluster.rollout.engine not in SAMPLERS and path.startswith("rollout.") and not path.startswith(RAYS):
        return Requirement(feature, OTHER_SAMPLER)
    if path == "rollout.ray_gpus" or (path, spec.cluster.rollout.weight_transport) == (RAYS[1], "nccl"):
        return Requirement(feature, RAY_GPUS)
    if path.startswith(RAYS):
        return Requirement(feature, RAY_VLLM if spec.cluster.rollout.engine == "vllm" else RAY_SAMPLERS)
    if path == "rollout.admit":
        ahead = spec.cluster.schedule.mode == "fully_async" and spec.cluster.rollout.admit == "rounds"
        return Requirement(feature, ADMIT_ROUNDS if ahead else ADMIT)
    parts = path.split(".")
    if path in APART and spec.cluster.rollout.ray_workers:
        return Requirement(feature, RAY_APART)
    if parts[0] == "schedule":
        return Requirement(feature, Supported("apps/grpo/tests/schedules_test.py"))
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return Requirement(feature, Unsupported(next(UNSUPPORTED_SETTINGS[name] for name in names if name in UNSUPPORTED_SETTINGS)))


def _vllm_experts(spec: RunSpec) -> Supported | Unsupported:
    if not spec.cluster.rollout.experts_over_copies:
        return _vllm("rollout.ep")
    on_a_cpu = "cpu" in (spec.cluster.rollout.device, spec.engine.device)
    return EXPERTS_OF_COPIES_ON_A_CPU if on_a_cpu else EXPERTS_OF_COPIES


def _vllm(path: str) -> Supported | Unsupported:
    if path in VLLM_FIELDS:
        return VLLM_FIELDS[path]
    return sampler_supports(SAMPLERS["vllm"], VLLM_FEATURES.get(path, "vllm"))


def _sampler(spec: RunSpec, feature: str) -> Supported | Unsupported:
    sampler = SAMPLERS.get(spec.cluster.rollout.engine)
    return OTHER_SAMPLER if sampler is None else sampler_supports(sampler, feature)


def _images(spec: RunSpec) -> Supported | Unsupported:
    return NO_VISION if spec.engine.vision == "off" else IMAGES


def _schedule(spec: RunSpec) -> list[Requirement]:
    """Return the requirements of a schedule on several machines, beside threads of the ranks and a sampling process."""
    return [Requirement("ray", RAY)] if spec.cluster.pools.nodes > 1 else []

"""The requirements of a run, and whether they are met: the engine's own answers, and a table of what the apps lack."""

from dataclasses import dataclass
from typing import Any

from engines.capability import Supported, Unsupported, features_of, supports
from engines.families.model_types import MODEL_TYPES
from runplan.checks.machine import kind_here
from runplan.run_spec import RunSpec
from runplan.samplers.base import OVERLAP
from runplan.settings import FLAGS

AT_START = Supported("engines/prove/proof.py, when the run starts")
RAYS_NODES = Unsupported("sampling on nodes of its own is Ray's: say --rollout.ray-workers")
# Fields, or groups of them, that have no effect yet, or that no test has run.
UNSUPPORTED_SETTINGS = {
    "pools.nodes": Unsupported("tests run two machines as namespaces of one host, no real ones", untested="nodes"),
    "pools.placement": RAYS_NODES,
    "pools.rollout_nodes": RAYS_NODES,
}
NO_NPU = Unsupported("no Ascend device was at hand: training ran on a stand-in alone", untested="npu")
NO_SAMPLING = Unsupported("a supervised run samples nothing: leave it at its default")
UNKNOWN_SIZE = Unsupported(
    "the recipe does not know the model's sizes, so that nothing can be held against it: leave it out"
)
SHARDS = Supported("apps/common/tests/weight_shards_test.py")
NO_SHARDS = {
    "one rank": Unsupported("of one rank all weights are its own: leave it out, or train on several ranks"),
    "adapters": Unsupported("adapters are sent by themselves: leave it out"),
    "shared": Unsupported("the sampler computes with the trainer's own tensors, nothing is sent: leave it out"),
}
OFFLOAD = Supported("apps/grpo/tests/offload_test.py::test_training_is_on_the_host_while_answers_are_sampled")
REFERENCE = Supported("apps/grpo/tests/lora_test.py::test_the_policy_is_held_to_a_frozen_model_beside_it")
TEACHERS = Supported("apps/grpo/tests/teacher_vllm_test.py::test_a_teacher_in_vllm_teaches_as_one_in_this_process")
NO_TEACHERS = Unsupported(
    "it ran on a CPU alone, and no plan counts its memory: name its directory as it is, or serve it (http://...)",
    untested="teacher",
)
RAY = Unsupported(
    "tests run ranks of several machines beside Ray's samplers or a sampling process as namespaces of one host, no "
    "real ones",
    untested="nodes",
)
RAY_NPUS = Unsupported(
    "Ray's samplers are given CUDA devices or processors, no NPUs: set --rollout.device cpu, or --rollout.ray-workers 0"
)
RAY_APART = Supported("apps/grpo/tests/ray_pools_test.py")
APART = ("pools.placement", "pools.rollout_nodes")
DENSE = Unsupported("the model has no router, and no token is sent to experts: leave --trainer.routing-replay out")
NOTHING_TO_REPLAY = Unsupported("a supervised run has no sampler whose experts it could replay: leave it out")
IMAGES = Supported("apps/grpo/tests/images_test.py::test_a_column_of_images_may_have_any_name")
NO_VISION = Unsupported("the model is trained on text: set --trainer.vision to frozen or trained")


@dataclass(frozen=True)
class Requirement:
    """One requirement of a run, and the answer."""

    feature: str
    answer: Supported | Unsupported

    @property
    def untested(self) -> str | None:
        """The name by which it may be had untested, where that is all it lacks."""
        return self.answer.untested if isinstance(self.answer, Unsupported) else None


def requirements(spec: RunSpec) -> list[Requirement]:
    """Return all requirements of the run beyond one device and text, each with its answer."""
    changed = [(path, value) for path, value in spec.cluster.changed if path != "env"]
    every = [*_engine_requirements(spec), *(_cluster_requirement(spec, path, value) for path, value in changed)]
    if spec.cluster.schedule.mode != "sync":
        every += _schedule(spec)
    if spec.engine.vision != "off" and spec.app == "grpo":
        every.append(Requirement("images shown to the sampler", spec.cluster.sampler.supports("media")))
    if spec.app == "grpo":
        every += [Requirement(feature, answer) for feature, answer in spec.cluster.sampler.requirements(spec).items()]
    if spec.engine.routing_replay:
        every += _replay(spec)
    if spec.reference_policy:
        every.append(Requirement("reference policy", REFERENCE))
    if spec.device_teachers:
        answer = TEACHERS if kind_here(spec) == "cpu" else NO_TEACHERS
        every += [Requirement(f"--teacher {name}", answer) for name in spec.device_teachers]
    return every


def _engine_requirements(spec: RunSpec) -> list[Requirement]:
    engine, shape = spec.engine, spec.shape
    features = features_of(engine)
    features += ["moe"] if shape is not None and shape.experts else []
    every = [Requirement(feature, supports(engine, feature)) for feature in features]
    if engine.device == "npu" and not spec.fake_device:
        every.append(Requirement("--trainer.device npu", NO_NPU))
    if engine.device == "npu" and spec.cluster.rollout.ray_workers and spec.cluster.rollout.device != "cpu":
        every.append(Requirement("Ray's samplers on NPUs", RAY_NPUS))
    if shape is not None:
        every.append(Requirement(f"family {shape.model_type}", _family(spec, shape.model_type)))
    return every


def _replay(spec: RunSpec) -> list[Requirement]:
    """Return the requirements of routing replay: a router, as far as the model is known, and a sampler."""
    if spec.app == "sft":
        return [Requirement("--trainer.routing-replay (experts to replay)", NOTHING_TO_REPLAY)]
    if has_experts(spec) is False:
        return [Requirement("--trainer.routing-replay (experts to replay)", DENSE)]
    return [
        Requirement("--trainer.routing-replay (experts to replay)", spec.cluster.sampler.supports("routed_experts"))
    ]


def has_experts(spec: RunSpec) -> bool | None:
    """Return whether the run's model has experts; None where that is unknown before the model is read."""
    if spec.shape is not None:
        return spec.shape.experts > 0
    from engines.families.registry import FAMILIES  # imports torch

    for family in FAMILIES:
        if spec.model_type in (*family.model_types, *family.wrappers):
            return bool(family.router)
    return None


def _family(spec: RunSpec, model_type: str) -> Supported | Unsupported:
    """Return whether a registered family describes the type, or a proof may admit it when the run starts."""
    for name, kinds in MODEL_TYPES.items():
        if model_type in kinds:
            return Supported(f"engines/families/{name}.py")
    from engines.families.registry import FAMILIES  # imports torch

    known = {kind: family.name for family in FAMILIES for kind in family.model_types}
    if model_type in known:
        return Supported(f"engines/families/{known[model_type]}.py")
    if spec.engine.prove != "off":
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # slow, and rarely needed

        if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return AT_START
    return Unsupported(f"no family of engines has it; there are {', '.join(sorted(known))}")


def _cluster_requirement(spec: RunSpec, path: str, value: Any) -> Requirement:
    feature = f"--{FLAGS.get(path, path.replace('_', '-'))} {value}"
    if path == "media.images_column":
        return Requirement(feature, _images(spec))
    if path == "pools.device_memory_gib":
        return Requirement(
            feature, UNKNOWN_SIZE if spec.shape is None else Supported("the plan's memory is held against it")
        )
    if spec.app == "sft" and path.split(".")[0] in ("rollout", "schedule", "offload"):
        return Requirement(feature, NO_SAMPLING)
    if path == "offload":
        return Requirement(feature, OFFLOAD if spec.cluster.schedule.mode == "sync" else OVERLAP)
    if path.startswith("rollout."):
        return Requirement(feature, spec.cluster.sampler.setting(spec, path))
    if path == "schedule.weight_sync":
        return Requirement(feature, _shards(spec))
    parts = path.split(".")
    if path in APART and spec.cluster.rollout.ray_workers:
        return Requirement(feature, RAY_APART)
    if parts[0] == "schedule":
        return Requirement(feature, Supported("apps/grpo/tests/schedules_test.py"))
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return Requirement(feature, next(UNSUPPORTED_SETTINGS[name] for name in names if name in UNSUPPORTED_SETTINGS))


def _shards(spec: RunSpec) -> Supported | Unsupported:
    if spec.ranks == 1:
        return NO_SHARDS["one rank"]
    if spec.engine.lora.rank:
        return NO_SHARDS["adapters"]
    return NO_SHARDS["shared"] if spec.cluster.sampler.shares_weights(spec) else SHARDS


def _images(spec: RunSpec) -> Supported | Unsupported:
    return NO_VISION if spec.engine.vision == "off" else IMAGES


def _schedule(spec: RunSpec) -> list[Requirement]:
    """Return the requirements of a schedule whose ranks are on several machines."""
    return [Requirement("ray", RAY)] if spec.cluster.pools.nodes > 1 else []

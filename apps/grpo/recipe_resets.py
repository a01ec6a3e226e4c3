"""Settings of a recipe that flags leave without an effect: they get their defaults, and a line each says so. What goes
along with a sampler that a flag chose is turned on, and told.

Nobody set them on the command line. Were they refused, a recipe's sampler, say, could not be changed by one flag.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from apps.common.cli.flags import changed, flag, leaves
from apps.common.samplers import sampler_plan
from apps.common.shrink.fields import value_at, with_values
from apps.grpo.config import GrpoConfig
from engines.capability import Unsupported
from schedules.config import ScheduleConfig
from seqpack.extensions.load_object import is_user_code

RAY = ("ray_cpus", "ray_gpus", "ray_nodes", "ray_address", "weight_transport")
CLIPS = ("clip_low", "clip_high", "dual_clip")


def without_idle_settings(recipe: GrpoConfig, parsed: GrpoConfig) -> tuple[GrpoConfig, list[str]]:
    """Return the recipe without its settings that the flags of `parsed` leave without an effect, with those that go
    along with vLLM (`along_with_vllm`), and a line a flag.

    A setting whose own flag was given stays. Values are not checked here.
    """
    given = set(changed(recipe, parsed))
    usual = {path: default for path, _, default in leaves(recipe)}
    values: dict[str, Any] = {}
    by_cause: dict[str, list[str]] = {}
    for path, cause in idle_settings(parsed, "cluster.rollout.engine" in given):
        before = value_at(recipe, path)
        if cause in given and path not in given and path not in values and before != usual[path]:
            values[path] = usual[path]
            by_cause.setdefault(cause, []).append(f"{flag(path)} {before} -> {usual[path]}")
    lines = [
        f"{flag(cause)} {value_at(parsed, cause)} leaves these of the recipe without an effect, they are reset: "
        + ", ".join(what)
        for cause, what in by_cause.items()
    ]
    along: list[str] = []
    if "cluster.rollout.engine" in given and parsed.cluster.rollout.engine == "vllm":
        from apps.grpo.vllm_defaults import along_with_vllm  # slow to load

        along = [*along_with_vllm(parsed)]
        off = ", ".join(flag(path).replace("rollout.", "rollout.no-") for path in along)
        lines += (
            [f"--rollout.engine vllm turns on {' and '.join(map(flag, along))} on a GPU (off: {off})"] if along else []
        )
    return with_values(recipe, values | dict.fromkeys(along, True)), lines


def idle_settings(config: GrpoConfig, of_sampler: bool = True) -> Iterator[tuple[str, str]]:
    """Yield the path of each setting that has no effect, and that of the setting which makes it so.

    `of_sampler`: also those that the sampler leaves without an effect, which its plan knows (it imports torch).
    """
    rollout, objective, pools = config.cluster.rollout, config.objective, config.cluster.pools
    for name in _not_of_the_sampler(config) if of_sampler else ():
        yield f"cluster.rollout.{name}", "cluster.rollout.engine"
    if not rollout.ray_workers:
        for name in RAY:
            yield f"cluster.rollout.{name}", "cluster.rollout.ray_workers"
    if pools.placement == "colocated":
        yield "cluster.pools.rollout_nodes", "cluster.pools.placement"
    if config.cluster.schedule.mode != "fully_async":
        for name in vars(ScheduleConfig()):
            if name not in ("mode", "weight_sync"):
                yield f"cluster.schedule.{name}", "cluster.schedule.mode"
    if config.engine.lr_schedule == "constant":
        for name in ("total_steps", "min_lr_ratio"):
            yield f"engine.{name}", "engine.lr_schedule"
    if not objective.kl_coef:
        yield "objective.kl_estimator", "objective.kl_coef"
    if objective.off_policy in (None, "none"):
        yield "objective.off_policy_cap", "objective.off_policy"
    if not (objective.off_policy or "").endswith("mask"):
        yield "objective.off_policy_floor", "objective.off_policy"
    if config.epochs * config.mini_batches == 1:
        for name in CLIPS:
            yield from ((f"objective.{name}", cause) for cause in ("mini_batches", "epochs"))


def _not_of_the_sampler(config: GrpoConfig) -> Iterator[str]:
    """Yield the names of the changed rollout settings that its engine does not obey."""
    layout: Any = config.cluster.rollout
    from apps.grpo.registry import spec_of  # slow to load

    try:
        plan, spec = sampler_plan(layout.engine, layout.engine_options), spec_of(replace(config, model=None))
    except ValueError:  # told, with the flag, where the values are checked
        return
    for name, value, default in leaves(layout):
        known = (
            name == "engine" or (name == "engine_options" and is_user_code(layout.engine)) or name in plan.own_settings
        )
        if value != default and not known and isinstance(plan.setting(spec, f"rollout.{name}"), Unsupported):
            yield name

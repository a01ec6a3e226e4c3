"""Samplers by the names that `--rollout.engine` has for them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from seqpack.extensions.load_object import load_object
from seqpack.extensions.options import bound

if TYPE_CHECKING:  # a command line names a sampler without torch
    from runplan.samplers.base import SamplerPlan
    from schedules.backend import SamplerBackend

SAMPLERS = {
    "native": "apps.grpo.sampling.native:NativeBackend",
    "vllm": "apps.grpo.sampling.vllm:VllmBackend",
    "openai": "apps.grpo.sampling.openai:OpenAiBackend",
}


def check_sampler(name: str, options: tuple[str, ...] = ()) -> None:
    """Refuse a sampler that nobody knows, and options that it has not; those of this project are not loaded for it.

    Raises:
        ValueError: see `sampler_backend`.
    """
    if name not in SAMPLERS:
        sampler_plan(name, options)
    elif options:
        raise ValueError(f"engine_options {options[0]} has no effect: engine {name!r} has no options")


@cache
def sampler_backend(name: str, options: tuple[str, ...] = ()) -> SamplerBackend:
    """Return the backend of a name, or the one that FILE.py:NAME or package.module:NAME is, with NAME=VALUE options.

    Raises:
        ValueError: there is none; what has that name is no `SamplerBackend`, or takes other options.
    """
    if name not in SAMPLERS and ":" not in name:
        raise ValueError(
            f"engine must be one of {', '.join(map(repr, SAMPLERS))}, or a schedules.SamplerBackend as FILE.py:NAME or "
            f"package.module:NAME, got {name!r}"
        )
    from schedules.backend import SamplerBackend  # slow to load

    backend = load_object(SAMPLERS.get(name, name), "rollout.engine")
    if not (isinstance(backend, type) and issubclass(backend, SamplerBackend)):
        raise ValueError(f"engine {name!r} is {backend!r}, which is no subclass of schedules.SamplerBackend")
    made: SamplerBackend = bound("engine_options", name, backend, options)()
    return made


@cache
def sampler_plan(name: str, options: tuple[str, ...] = ()) -> SamplerPlan:
    """Return the sampler of a name in a plan; the backends of this project are not loaded for it.

    Raises:
        ValueError: see `sampler_backend`; or what the backend's `plan` returns is no `SamplerPlan`.
    """
    from runplan.samplers.base import SamplerPlan  # slow to load
    from runplan.samplers.registry import SAMPLER_PLANS  # slow to load

    if name in SAMPLER_PLANS:
        return SAMPLER_PLANS[name]()
    plan = sampler_backend(name, options).plan()
    if plan is not None and not isinstance(plan, SamplerPlan):
        raise ValueError(f"plan() of engine {name!r} returned {plan!r}: return a runplan.SamplerPlan, or None")
    return plan or SamplerPlan()


def owners_of(setting: str) -> list[str]:
    """Return the samplers of this project that alone have a field of the rollout settings."""
    from runplan.samplers.registry import SAMPLER_PLANS  # slow to load

    return [name for name, plan in SAMPLER_PLANS.items() if setting in plan.own_settings]

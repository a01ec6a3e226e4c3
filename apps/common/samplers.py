"""Samplers by the names that `--rollout.engine` has for them."""

from functools import cache

from rollout.environments.load_object import load_object
from runplan.samplers.base import SamplerPlan
from runplan.samplers.registry import SAMPLER_PLANS
from schedules.backend import SamplerBackend

SAMPLERS = {
    "native": "apps.grpo.sampling.native:NativeBackend",
    "vllm": "apps.grpo.sampling.vllm:VllmBackend",
    "openai": "apps.grpo.sampling.openai:OpenAiBackend",
}


def check_sampler(name: str) -> None:
    """Refuse a sampler that nobody knows; those of this project are not loaded for it.

    Raises:
        ValueError: see `sampler_backend`.
    """
    if name not in SAMPLERS:
        sampler_plan(name)


@cache
def sampler_backend(name: str) -> SamplerBackend:
    """Return the backend of a name, or the one that FILE.py:NAME or package.module:NAME is.

    Raises:
        ValueError: there is none; or what has that name is no `SamplerBackend`.
    """
    if name not in SAMPLERS and ":" not in name:
        raise ValueError(
            f"engine must be one of {', '.join(map(repr, SAMPLERS))}, or a schedules.SamplerBackend as FILE.py:NAME or "
            f"package.module:NAME, got {name!r}"
        )
    backend = load_object(SAMPLERS.get(name, name), "sampler")
    if not (isinstance(backend, type) and issubclass(backend, SamplerBackend)):
        raise ValueError(f"engine {name!r} is {backend!r}, which is no subclass of schedules.SamplerBackend")
    return backend()


@cache
def sampler_plan(name: str) -> SamplerPlan:
    """Return the sampler of a name in a plan; the backends of this project are not loaded for it.

    Raises:
        ValueError: see `sampler_backend`; or what the backend's `plan` returns is no `SamplerPlan`.
    """
    if name in SAMPLER_PLANS:
        return SAMPLER_PLANS[name]()
    plan = sampler_backend(name).plan()
    if plan is not None and not isinstance(plan, SamplerPlan):
        raise ValueError(f"plan() of engine {name!r} returned {plan!r}: return a runplan.SamplerPlan, or None")
    return plan or SamplerPlan()


def owners_of(setting: str) -> list[str]:
    """Return the samplers of this project that alone have a field of the rollout settings."""
    return [name for name, plan in SAMPLER_PLANS.items() if setting in plan.own_settings]

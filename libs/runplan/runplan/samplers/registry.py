"""The samplers of this project by the names that `--rollout.engine` has for them."""

from runplan.samplers.base import SamplerPlan
from runplan.samplers.native import NativePlan
from runplan.samplers.openai import OpenAiPlan
from runplan.samplers.vllm import VllmPlan

SAMPLER_PLANS: dict[str, type[SamplerPlan]] = {"native": NativePlan, "vllm": VllmPlan, "openai": OpenAiPlan}


def sampler_plan(name: str) -> SamplerPlan:
    """Return the sampler of a name in a plan; of another one than this project's nothing is known."""
    return SAMPLER_PLANS.get(name, SamplerPlan)()

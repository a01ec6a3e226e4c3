"""A sampler behind an OpenAI-compatible server in a plan: its memory is the server's, and it takes no weights."""

from engines.capability import Supported, Unsupported
from rollout.capability import backend_supports
from runplan.run_spec import RunSpec
from runplan.samplers.base import SamplerPlan


class OpenAiPlan(SamplerPlan):
    """Server in a plan."""

    kind = "a server"

    def supports(self, feature: str) -> Supported | Unsupported:
        """Return whether it has a feature of rollout's engines."""
        return backend_supports("openai", feature)

    def setting(self, spec: RunSpec, path: str) -> Supported | Unsupported:
        """Return why it can't be the sampler of a run."""
        del spec, path
        return self.supports("two_phase_weights")

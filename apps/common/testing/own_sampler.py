"""For tests: a sampler of somebody else's that takes engine arguments, and samples nothing."""

from pathlib import Path
from typing import Any

from rollout import RolloutEngine
from runplan.samplers.base import SamplerPlan
from schedules.backend import SamplerBackend


class OwnPlan(SamplerPlan):
    """Sampler in a plan, which takes `--rollout.vllm`."""

    own_settings = ("vllm",)


class OwnSampler(SamplerBackend):
    """Sampler that can be named, and never built."""

    def build(self, config: Any, model: Path, version: int) -> RolloutEngine:
        """Raise NotImplementedError."""
        raise NotImplementedError

    def dtype(self, config: Any, model: Path, engine: RolloutEngine) -> str:
        """Raise NotImplementedError."""
        raise NotImplementedError

    def plan(self) -> OwnPlan:
        """Return it in a plan."""
        return OwnPlan()


OWN_SAMPLER = f"{OwnSampler.__module__}:{OwnSampler.__name__}"
"""Its name for `--rollout.engine`."""

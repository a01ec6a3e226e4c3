"""Sampler behind an OpenAI server, which a run can be planned with: it cannot take a run's weights."""

from pathlib import Path

from apps.grpo.config import GrpoConfig
from rollout import RolloutEngine
from runplan.samplers.openai import OpenAiPlan
from schedules.backend import SamplerBackend


class OpenAiBackend(SamplerBackend):
    """A server of its own."""

    def build(self, config: GrpoConfig, model: Path, version: int) -> RolloutEngine:
        """Raise ValueError: a server cannot take a run's weights."""
        del model, version
        raise ValueError(f"--rollout.engine {config.cluster.rollout.engine} can't take a run's weights")

    def dtype(self, config: GrpoConfig, model: Path, engine: RolloutEngine) -> str:
        """Raise ValueError: nobody knows what a server computes in."""
        del model, engine
        raise ValueError(f"--rollout.engine {config.cluster.rollout.engine} can't take a run's weights")

    def plan(self) -> OpenAiPlan:
        """Return the server in a plan."""
        return OpenAiPlan()

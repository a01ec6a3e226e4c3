"""For tests: a sampler of somebody else's that takes engine arguments, and samples nothing."""

from pathlib import Path
from typing import Any

from rollout import RolloutEngine
from runplan.samplers.base import SamplerPlan
from schedules.backend import SamplerBackend
from schedules.registry import ScheduleParts
from schedules.sync import SyncSchedule


class OwnPlan(SamplerPlan):
    """Sampler in a plan, which takes `--rollout.vllm`."""

    own_settings = ("vllm",)


class OwnSampler(SamplerBackend):
    """Sampler that can be named, and never built; it has an option."""

    def __init__(self, width: int = 2) -> None:
        self.width = width

    def build(self, config: Any, model: Path, version: int) -> RolloutEngine:
        """Raise NotImplementedError."""
        raise NotImplementedError

    def dtype(self, config: Any, model: Path, engine: RolloutEngine) -> str:
        """Raise NotImplementedError."""
        raise NotImplementedError

    def plan(self) -> OwnPlan:
        """Return it in a plan."""
        return OwnPlan()


def own_schedule(parts: ScheduleParts, every: int = 1) -> SyncSchedule:
    """Return a schedule of somebody else's, which has an option."""
    del every
    return SyncSchedule(parts.sampled_here, parts.trainer, parts.run)


OWN_SCHEDULE = f"{OwnSampler.__module__}:{own_schedule.__name__}"
"""The schedule's name for `--schedule`."""
OWN_SAMPLER = f"{OwnSampler.__module__}:{OwnSampler.__name__}"
"""Its name for `--rollout.engine`."""

"""The settings of a run as plain dataclasses, for a program without settings of its own: one machine by default."""

from dataclasses import dataclass, field
from typing import Any, Literal

from engines import EngineConfig
from runplan.samplers.base import SamplerPlan
from runplan.samplers.registry import sampler_plan


@dataclass(frozen=True)
class PlainPools:
    """`settings.PoolSettings`."""

    nodes: int = 1
    placement: Literal["colocated", "separate"] = "colocated"
    rollout_nodes: int = 0
    device_memory_gib: float | None = None


@dataclass(frozen=True)
class PlainRollout:
    """`settings.RolloutSettings`."""

    engine: str = "native"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    copies_per_device: int = 1
    memory_share: float = 0.0
    max_model_tokens: int | None = None
    ray_workers: int = 0
    ray_nodes: int = 1
    weight_transport: str = "auto"
    admit: str | None = None
    kv_cache_memory_gib: float | None = None
    weights_on_device: bool = False
    sleep: bool = False
    device: Literal["auto", "cpu"] = "auto"

    @property
    def devices(self) -> int:
        """Number of devices that one engine spans."""
        return self.tp * self.pp * self.dp // self.copies_per_device

    @property
    def experts_over_copies(self) -> bool:
        """Whether each copy has a part of the experts."""
        return self.ep > self.tp


@dataclass(frozen=True)
class PlainSchedule:
    """`settings.ScheduleSettings`."""

    mode: Literal["sync", "one_step_off", "fully_async"] = "sync"
    stale_share: float = 0.0
    parameter_sync_step: int = 1
    weight_sync: Literal["whole", "shards"] = "whole"
    required_batches: int = 1
    interrupts: bool = False


@dataclass(frozen=True)
class PlainCluster:
    """`settings.ClusterSettings`."""

    pools: PlainPools = field(default_factory=PlainPools)
    rollout: PlainRollout = field(default_factory=PlainRollout)
    schedule: PlainSchedule = field(default_factory=PlainSchedule)
    offload: bool = False
    env: tuple[str, ...] = ()
    changed: tuple[tuple[str, Any], ...] = ()
    apart: str | None = None
    """Why a native sampler has weights of its own; None where it shares training's."""
    own_sampler: SamplerPlan | None = None
    """Sampler of your own in a plan, where `rollout.engine` is none of this project's."""

    @property
    def sampler(self) -> SamplerPlan:
        """Sampler in a plan."""
        return self.own_sampler or sampler_plan(self.rollout.engine)

    def weights_apart(self, engine: EngineConfig) -> str | None:  # noqa: ARG002  as the protocol has it
        """Return `apart`."""
        return self.apart

"""The settings of a run that a plan reads, as protocols: any objects with these attributes will do.

The parallelism of training is the engine's own setting (`engines.EngineConfig`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from engines import EngineConfig

if TYPE_CHECKING:  # they import one another
    from runplan.samplers.base import SamplerPlan


FLAGS = {
    "rollout.engine_options": "sampler-options",
    "rollout.tp": "rollout.tensor-parallel",
    "rollout.pp": "rollout.pipeline-parallel",
    "rollout.dp": "rollout.data-parallel",
    "rollout.ep": "rollout.expert-parallel",
    "rollout.memory_share": "rollout.gpu-memory-utilization",
    "schedule.options": "schedule-options",
}
"""Flags that have another name than their setting."""


class PoolSettings(Protocol):
    """Machines that train, and machines that sample."""

    @property
    def nodes(self) -> int:
        """Number of machines that train."""

    @property
    def placement(self) -> Literal["colocated", "separate"]:
        """Whether training and sampling take turns on the same devices ("colocated"), or have "separate" ones."""

    @property
    def rollout_nodes(self) -> int:
        """Number of machines that sample, where the placement is "separate"."""

    @property
    def device_memory_gib(self) -> float | None:
        """GiB of memory of a device, where it is known."""


class RolloutSettings(Protocol):
    """The sampling engine and its spread over devices."""

    @property
    def engine(self) -> str:
        """Sampler: "native", "vllm", "openai", or the name of another one."""

    @property
    def tp(self) -> int:
        """Number of workers that share each matrix."""

    @property
    def pp(self) -> int:
        """Number of stages of layers, each of `tp` workers."""

    @property
    def dp(self) -> int:
        """Number of copies of the model in one engine."""

    @property
    def ep(self) -> int:
        """Number of workers that share the experts."""

    @property
    def copies_per_device(self) -> int:
        """Number of copies of the model that share a device."""

    @property
    def devices(self) -> int:
        """Number of devices that one engine spans."""

    @property
    def experts_over_copies(self) -> bool:
        """Whether each copy has a part of the experts."""

    @property
    def memory_share(self) -> float:
        """Share of a device's memory for weights and caches; 0 leaves it to the engine."""

    @property
    def max_model_tokens(self) -> int | None:
        """Longest sequence that the engine accepts."""

    @property
    def ray_workers(self) -> int:
        """Number of samplers in actors of a Ray cluster; 0 without Ray."""

    @property
    def ray_nodes(self) -> int:
        """Number of machines that each of them spans."""

    @property
    def weight_transport(self) -> str:
        """Transport of weight sync to Ray's samplers."""

    @property
    def admit(self) -> str | None:
        """When the native engine lets a request begin: "rounds" or "any_step"."""

    @property
    def kv_cache_memory_gib(self) -> float | None:
        """GiB of the native engine's caches at most; None: whatever its requests need."""

    @property
    def weights_on_device(self) -> bool:
        """Whether vLLM's new weights wait in the memory of its device."""

    @property
    def sleep(self) -> bool:
        """Whether vLLM frees its memory while its devices train."""

    @property
    def device(self) -> Literal["auto", "cpu"]:
        """Device that vLLM computes on; "auto": training's."""


class ScheduleSettings(Protocol):
    """The schedule between sampling and training."""

    @property
    def mode(self) -> str:
        """Name of the schedule."""

    @property
    def stale_share(self) -> float:
        """Share of a step's samples that may come from older weights."""

    @property
    def parameter_sync_step(self) -> int:
        """Optimizer steps between two weight syncs."""

    @property
    def weight_sync(self) -> Literal["whole", "shards"]:
        """Whether ranks gather tensors for a weight sync, or send their own shards."""

    @property
    def required_batches(self) -> int:
        """Mini-batches of prompts that an optimizer step waits for."""

    @property
    def interrupts(self) -> bool:
        """Whether sampling is interrupted for new weights (partial rollout)."""


class ClusterSettings(Protocol):
    """The settings of a run beside its engine's."""

    @property
    def pools(self) -> PoolSettings:
        """Machines."""

    @property
    def rollout(self) -> RolloutSettings:
        """The sampling engine."""

    @property
    def sampler(self) -> "SamplerPlan":
        """Sampler of that name in a plan: its memory, requirements and launch needs."""

    @property
    def schedule(self) -> ScheduleSettings:
        """The schedule."""

    @property
    def offload(self) -> bool:
        """Whether training's states are in host memory while the engine samples."""

    @property
    def env(self) -> tuple[str, ...]:
        """Environment variables to set when the program is started, as NAME=value."""

    @property
    def changed(self) -> Sequence[tuple[str, Any]]:
        """Dotted names of the settings that are not at their defaults, each with its value; each is a requirement."""

    def weights_apart(self, engine: EngineConfig) -> str | None:
        """Return why a native sampler has weights of its own; None where it may compute with training's."""

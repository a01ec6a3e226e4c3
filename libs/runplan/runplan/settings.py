"""What a plan reads of the settings of a run, as protocols: any objects with these attributes will do.

How the model is spread over training ranks is the engine's own (`engines.EngineConfig`).
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from engines import EngineConfig


class PoolSettings(Protocol):
    """Machines that train, and those that sample."""

    @property
    def nodes(self) -> int:
        """Machines that train."""

    @property
    def placement(self) -> Literal["colocated", "separate"]:
        """Whether training and sampling take turns on the same devices."""

    @property
    def rollout_nodes(self) -> int:
        """Machines that sample, where the placement is "separate"."""

    @property
    def device_memory_gib(self) -> float | None:
        """Memory of a device, where it is known."""


class RolloutSettings(Protocol):
    """The sampling engine and its spread over devices."""

    @property
    def engine(self) -> str:
        """What samples: "native", "vllm", "openai", or the name of another sampler."""

    @property
    def tp(self) -> int:
        """Workers that share each matrix."""

    @property
    def dp(self) -> int:
        """Copies of the model in one engine."""

    @property
    def ep(self) -> int:
        """Workers that share the experts."""

    @property
    def copies_per_device(self) -> int:
        """Copies of the model that share a device."""

    @property
    def devices(self) -> int:
        """Devices that one engine spans."""

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
        """Samplers in actors of a Ray cluster; 0 without Ray."""

    @property
    def weight_transport(self) -> str:
        """How new weights reach Ray's samplers."""

    @property
    def admit(self) -> str | None:
        """When the native engine lets a request begin: "rounds" or "any_step"."""

    @property
    def weights_on_device(self) -> bool:
        """Whether vLLM's new weights wait in the memory of its device."""

    @property
    def sleep(self) -> bool:
        """Whether vLLM gives its memory back while its devices train."""

    @property
    def device(self) -> Literal["auto", "cpu"]:
        """What vLLM computes on; "auto": what training has."""


class ScheduleSettings(Protocol):
    """Who waits for whom between sampling and training."""

    @property
    def mode(self) -> str:
        """The schedule."""

    @property
    def stale_share(self) -> float:
        """Share of a step's samples that may come from older weights."""

    @property
    def parameter_sync_step(self) -> int:
        """Optimizer steps between two transfers of weights."""

    @property
    def required_batches(self) -> int:
        """Mini-batches of prompts that an optimizer step waits for."""

    @property
    def interrupts(self) -> bool:
        """Whether generation is interrupted for new weights."""


class ClusterSettings(Protocol):
    """The settings of a run beside its engine's."""

    @property
    def pools(self) -> PoolSettings:
        """Machines."""

    @property
    def rollout(self) -> RolloutSettings:
        """The sampling engine."""

    @property
    def schedule(self) -> ScheduleSettings:
        """Who waits for whom."""

    @property
    def offload(self) -> bool:
        """Whether training's states are in host memory while answers are sampled."""

    @property
    def env(self) -> tuple[str, ...]:
        """Variables that whoever starts the program sets, as NAME=value."""

    @property
    def changed(self) -> Sequence[tuple[str, Any]]:
        """Dotted names of the settings that are not at their defaults, each with its value; each is a requirement."""

    def weights_apart(self, engine: EngineConfig) -> str | None:
        """Return why a native sampler has weights of its own; None where it may compute with training's."""

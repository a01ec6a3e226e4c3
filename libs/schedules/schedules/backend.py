"""Sampler backend: the one object that a choice of sampler is."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout import RolloutEngine


class SamplerBackend(ABC):
    """Sampler of a run, chosen by name: it builds, checks, names its weights, and states what it needs.

    `config` is the app's configuration (`apps.grpo.config.GrpoConfig`), `layout` its `cluster.rollout`. A backend of
    another package derives from this class; its name on the command line is `FILE.py:NAME` or `package.module:NAME`.
    """

    module_names: bool = False
    """Whether it takes weights under the names of the trained module, not of its checkpoint."""
    spans_ranks: bool = False
    """Whether one engine spans the devices of several training ranks, the first of which has it."""

    variables: tuple[str, ...] = ()
    """Environment variables that its processes need where they are started by Ray."""

    @abstractmethod
    def build(self, config: Any, model: Path, version: int) -> RolloutEngine:
        """Return an engine with the weights in a model directory, which count as number `version`."""

    def begin(self, config: Any, model: Path, version: int) -> Any:
        """Begin to start an engine that has a process of its own, and return it (`schedules.protocols.StartingEngine`);
        None: `build` returns it whole. Training's engine is built while the process starts."""
        del config, model, version
        return None

    def shares_device(self, config: Any) -> bool:
        """Return whether an engine in another process takes memory of a device that training has.

        Such an engine measures free memory as it starts, so nothing else is built on the device meanwhile.
        """
        del config
        return True

    def build_sharing(self, config: Any, model: Path, version: int, trained: Any) -> RolloutEngine:
        """Return an engine that computes with the weights of a train engine of this process where it can."""
        del trained
        return self.build(config, model, version)

    @abstractmethod
    def dtype(self, config: Any, model: Path, engine: RolloutEngine) -> str:
        """Return what the engine computes in: "bfloat16", "float16" or "float32"."""

    def weights_apart(self, config: Any) -> str | None:
        """Return why it cannot compute with the weights of a train engine of its process; None where it may."""
        del config
        return "it is a sampler of your own that keeps it so (SamplerBackend.weights_apart)"

    def check_machine(self, config: Any) -> None:
        """Raise ValueError, with the setting to change, where this machine lacks what the backend needs."""
        del config

    def check_model(self, config: Any, directory: Path, model: Any) -> None:
        """Raise ValueError where it cannot sample from a model; `model`: its transformers configuration."""
        del config, directory, model

    def devices(self, layout: Any) -> int:
        """Return how many devices one engine spans."""
        del layout
        return 1

    def layout_problems(self, layout: Any) -> Sequence[str]:
        """Return a text for each of its own settings (`SamplerPlan.own_settings`) that is wrong, with its flag."""
        del layout
        return ()

    def plan(self) -> Any:
        """Return the `runplan.SamplerPlan` that states its memory (`buffers`: bytes of weights and caches on device and
        host), requirements and launch needs; without one a plan says "a sampler of its own: not planned"."""
        return None

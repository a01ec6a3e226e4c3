"""Sampler in a plan: the one object that states its memory, its requirements and its launch needs."""

from typing import Literal

from engines import EngineConfig
from engines.capability import Supported, Unsupported
from runplan.estimates.buffers import Buffer
from runplan.estimates.peak_memory import Peak
from runplan.estimates.states import States, width_of
from runplan.estimates.sync_rates import RAY, SyncRate
from runplan.model.model_shape import ModelShape
from runplan.run_spec import RunSpec
from runplan.samplers.pool_lines import LinesAndProblems, places
from runplan.settings import RolloutSettings

RAYS = ("rollout.ray_", "rollout.weight_transport")
"""Prefixes of the settings that only Ray's samplers obey."""
RAY_GPUS = Supported("apps/grpo/tests/ray_gpu_test.py")
RAY_SAMPLERS = Supported("apps/grpo/tests/schedule_ray_test.py")
OTHER_SAMPLER = Supported("the sampler checks its own settings")
OVERLAP = Unsupported(
    "sampling and training overlap, on devices of their own: leave it out, or use --schedule.mode sync"
)
SamplerDevice = Literal["auto", "cpu"]


class SamplerPlan:
    """Sampler in a plan. This one has unknown memory and no requirements; a sampler of your own overrides the rest."""

    kind: str = "a sampler"
    """What it is called where its memory is unknown."""
    in_process: bool = False
    """Whether it computes in the processes that train, on the device of each, unless it runs in Ray's actors."""
    own_settings: tuple[str, ...] = ()
    """Fields of the rollout settings that only it has."""
    target: str = ""
    """Target of the app that brings its packages; "" where the app's own does."""
    ray: Supported | Unsupported = RAY_SAMPLERS
    """Whether it runs in Ray's actors."""

    def buffers(self, shape: ModelShape, layout: RolloutSettings, width: int) -> list[Buffer]:
        """Return the memory of its process for a model: weights, caches, weights that are staged.

        Args:
            shape: the sizes of the model.
            layout: the run's rollout settings.
            width: bytes of a number in what training computes.
        """
        del shape, layout, width
        return []

    def held(self, spec: RunSpec, shape: ModelShape) -> list[Buffer]:
        """Return its rows of the memory table: what it keeps in processes of the run, by the ledger's names.

        Args:
            spec: the run.
            shape: the sizes of its model.
        """
        del spec, shape
        return []

    def shares_weights(self, spec: RunSpec) -> bool:
        """Return whether it computes with training's weights in place."""
        del spec
        return False

    def sync_rate(self, spec: RunSpec) -> SyncRate | None:
        """Return the seconds of a GiB of weights to it; None where no way of its kind was measured."""
        rollout = spec.cluster.rollout
        if rollout.ray_workers:
            return RAY["objects" if rollout.weight_transport == "auto" else rollout.weight_transport]
        return self.own_sync_rate(spec)

    def own_sync_rate(self, spec: RunSpec) -> SyncRate | None:
        """Return the same where it does not run in Ray's actors."""
        del spec
        return None

    def pool(self, spec: RunSpec, shape: ModelShape, states: States, peak: Peak) -> LinesAndProblems:
        """Return lines and problems of the sampling devices, and of the processes that feed them.

        Args:
            spec: the run.
            shape: the sizes of its model.
            states: the training states of the fullest rank.
            peak: the fullest moment of a training step.
        """
        del states, peak
        if self.shares_weights(spec):
            return ["weights of each sampler: training's own, in place"], []
        buffers = self.buffers(shape, spec.cluster.rollout, width_of(spec.engine))
        lines = [f"{buffer.name} of each sampler: {places(buffer)}" for buffer in buffers]
        return lines or [f"{self.kind} of its own: not planned"], []

    def supports(self, feature: str) -> Supported | Unsupported:
        """Return whether it has a feature of rollout's engines, such as "media" or "routed_experts"."""
        del feature
        return OTHER_SAMPLER

    def requirements(self, spec: RunSpec) -> dict[str, Supported | Unsupported]:
        """Return further requirements of a run with it, by their names in the plan, each with its answer."""
        del spec
        return {}

    def setting(self, spec: RunSpec, path: str) -> Supported | Unsupported:
        """Return whether a changed rollout setting, such as "rollout.tp", has an effect on it."""
        if path == "rollout.ray_nodes":
            return self.own_setting(spec, path)
        if path == "rollout.ray_gpus" or (path, spec.cluster.rollout.weight_transport) == (RAYS[1], "nccl"):
            return RAY_GPUS
        return self.ray if path.startswith(RAYS) else self.own_setting(spec, path)

    def own_setting(self, spec: RunSpec, path: str) -> Supported | Unsupported:
        """Return the same of the settings that are not Ray's."""
        del spec, path
        return OTHER_SAMPLER

    def shares_processors(self, spec: RunSpec) -> bool:
        """Return whether its workers, more than there are ranks, share a machine's processors."""
        del spec
        return False

    def shrunk_device(self, engine: EngineConfig, layout: RolloutSettings) -> SamplerDevice:
        """Return what it computes on in a shrunk run: by default the run's own choice."""
        del engine
        return layout.device

    def seen_here(self, spec: RunSpec) -> list[str]:
        """Return lines on its packages on this machine: what is there, or what is missing and how to fix it."""
        del spec
        return []

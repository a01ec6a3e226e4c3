"""The native sampler in a plan: a whole model on each device, or training's own weights in place."""

import torch

from engines import EngineConfig
from engines.capability import Supported, Unsupported
from engines.fast.support import replicated_weights
from rollout.capability import backend_supports
from runplan.estimates.buffers import Buffer, largest_tensor, total_parameters
from runplan.model.model_shape import ModelShape
from runplan.run_spec import RunSpec
from runplan.samplers.base import SamplerPlan
from runplan.settings import ClusterSettings, RolloutSettings

NO_OPTIONS = Unsupported("the native engine holds a whole model on each device and has no options of its own")
ADMIT = Supported("apps/grpo/sampling/native_test.py")
ADMIT_ROUNDS = Unsupported(
    "the samplers of fully_async let requests begin at any step: leave it out, or use another schedule"
)


class NativePlan(SamplerPlan):
    """Native sampler in a plan."""

    in_process = True

    def buffers(self, shape: ModelShape, layout: RolloutSettings, width: int) -> list[Buffer]:
        """Return its weights, and the second set that a weight sync stages."""
        del layout
        whole = float(width * total_parameters(shape))
        return [
            Buffer("weights", device=whole, always=True),
            Buffer("staged weights", device=whole + width * largest_tensor(shape)),
        ]

    def shares_weights(self, spec: RunSpec) -> bool:
        """Return whether it computes with training's weights in place."""
        return shares_weights(spec.engine, spec.cluster, spec.ranks, spec.shards)

    def supports(self, feature: str) -> Supported | Unsupported:
        """Return whether it has a feature of rollout's engines."""
        return backend_supports("native", feature)

    def own_setting(self, spec: RunSpec, path: str) -> Supported | Unsupported:
        """Return whether a changed rollout setting has an effect on it."""
        if path != "rollout.admit":
            return NO_OPTIONS
        ahead = spec.cluster.schedule.mode == "fully_async" and spec.cluster.rollout.admit == "rounds"
        return ADMIT_ROUNDS if ahead else ADMIT


def shares_weights(engine: EngineConfig, cluster: ClusterSettings, ranks: int, shards: int) -> bool:
    """Return whether the native sampler computes with the trainer's weights in place.

    A run asks its engine itself (`engines.shared_parameters`). `shards`: ranks that share a copy of sharded weights.
    """
    if cluster.weights_apart(engine) is not None or engine.backend != "fsdp2" or engine.lora.rank:
        return False
    on_cpu = engine.device == "cpu"
    alone = engine.weights == "auto" and ranks == 1 and not on_cpu
    if (alone or engine.weights == "replicated") and replicated_weights(engine, torch.device("cpu")):
        return True
    dtype = ("float32" if on_cpu else "bfloat16") if engine.dtype == "auto" else engine.dtype
    return shards == 1 and dtype == engine.master_dtype and (on_cpu or not engine.parameters_on_host)

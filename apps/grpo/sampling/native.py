"""Native sampler: rollout's own engine over a module that the engines library makes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from apps.common.data.tokenizer import load_tokenizer
from apps.common.sampler_memory import cache_bytes
from apps.grpo.config import GrpoConfig
from engines import EngineConfig, SharedParameters, TrainEngine, Unsupported, shared_parameters
from engines.families.torch_operations import choose_torch_operations
from engines.loading import compute_dtype, empty_module, load_model, resolve_device
from rollout import NativeEngine, RolloutEngine, SharingEngine
from rollout.config import Admission
from runplan.samplers.native import NativePlan
from schedules.backend import SamplerBackend


class NativeBackend(SamplerBackend):
    """The app's own sampler. It runs the module that is trained, so weights have the module's names."""

    module_names = True

    def build(self, config: GrpoConfig, model: Path, version: int) -> NativeEngine:
        """Return an engine over a module of its own, read from `model`."""
        return self.build_sharing(config, model, version, None)

    def build_sharing(self, config: GrpoConfig, model: Path, version: int, trained: TrainEngine | None) -> NativeEngine:
        """Return an engine over the weights of `trained`, where they can be shared, else over a module of its own."""
        wanted = engine_config(config, model)
        device = resolve_device(wanted)
        dtype = compute_dtype(wanted, device)
        options: dict[str, Any] = {
            "tokenizer": (tokenizer := load_tokenizer(model)),
            "pad_token_id": tokenizer.pad_token_id or 0,
            "seed": config.seed,
            "admit": admission(config),
            "routed_experts": wanted.routing_replay,
            "kv_cache_memory_bytes": cache_bytes(config.cluster.rollout),
        }
        shared = (
            Unsupported("nothing is trained beside it") if trained is None else self.shared_parameters(config, trained)
        )
        apart = isinstance(shared, Unsupported)
        module = load_model(wanted, dtype=dtype, device=device) if apart else empty_module(wanted, dtype)
        choose_torch_operations(module)
        if isinstance(shared, Unsupported):
            return NativeEngine(module, version=version, **options)
        return SharingEngine(module, shared, version, **options)

    def shared_parameters(self, config: GrpoConfig, trained: TrainEngine) -> SharedParameters | Unsupported:
        """Return the trained weights for a sampler in the same process; or why that one has a copy, the same on every
        rank."""
        reason = self.weights_apart(config)
        return shared_parameters(trained) if reason is None else Unsupported(reason)

    def weights_apart(self, config: GrpoConfig) -> str | None:
        """Return why it cannot compute with its training process's weights; None where it may."""
        return config.cluster.weights_apart(config.engine)

    def shares_device(self, config: GrpoConfig) -> bool:
        """Return whether a sampling process takes memory of training's device: not on a CPU."""
        return resolve_device(config.engine).type != "cpu"

    def dtype(self, config: GrpoConfig, model: Path, engine: RolloutEngine) -> str:
        """Return what its module computes in."""
        del engine
        wanted = engine_config(config, model)
        return str(compute_dtype(wanted, resolve_device(wanted))).removeprefix("torch.")

    def weights_line(self, config: GrpoConfig, engine: object, trained: TrainEngine) -> str | None:
        """Return what a run says once of where its own sampler has the weights; None of any other sampler."""
        if isinstance(engine, SharingEngine):
            return "the sampler computes with training's weights in place"
        if not isinstance(engine, NativeEngine):
            return None
        shared = self.shared_parameters(config, trained)
        reason = shared.reason if isinstance(shared, Unsupported) else "its module was given"
        reason = config.cluster.rollout.backend.weights_apart(config) or reason
        return f"the sampler has a copy of the weights: {reason}"

    def plan(self) -> NativePlan:
        """Return the native sampler in a plan."""
        return NativePlan()


def admission(config: GrpoConfig) -> Admission:
    """Return when requests begin: as asked; else in rounds, but for fully_async, whose answers wait for nobody.

    In rounds a run that is killed and resumed ends with the bits of one that was not. At any step no answer waits for
    the longest of those before it, and which rows share a step, hence the last bits, hangs on how fast threads are.
    """
    if config.cluster.rollout.admit is not None:
        return config.cluster.rollout.admit
    return "any_step" if config.cluster.schedule.mode == "fully_async" else "rounds"


def engine_config(config: GrpoConfig, model: Path) -> EngineConfig:
    """Return the training engine's settings, with the model to start from."""
    return replace(config.engine, model=str(model), temperature=config.sampling.temperature)

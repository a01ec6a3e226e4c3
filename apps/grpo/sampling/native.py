"""The app's own sampler: the native engine over a module of its own, read from a model's directory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from apps.common.plan.buffers import kept_apart
from apps.grpo.config import GrpoConfig
from engines import EngineConfig, No, SharedWeights, TrainEngine, shared_weights
from engines.families.torch_operations import choose_torch_operations
from engines.loading import compute_dtype, empty_module, load_model, resolve_device
from rollout import NativeEngine, SharingEngine
from rollout.config import Admission


def admission(config: GrpoConfig) -> Admission:
    """Return when requests begin: as asked; else in rounds, but for fully_async, whose answers wait for nobody.

    In rounds a run that is killed and resumed ends with the bits of one that was not. At any step no answer waits for
    the longest of those before it, and which rows share a step, hence the last bits, hangs on how fast threads are.
    """
    if config.cluster.rollout.admit is not None:
        return config.cluster.rollout.admit
    return "any_step" if config.cluster.schedule.mode == "fully_async" else "rounds"


def native_engine(
    config: GrpoConfig,
    model: Path,
    tokenizer: PreTrainedTokenizerBase,
    version: int,
    trained: TrainEngine | None = None,
) -> NativeEngine:
    """Return the sampler: over the weights of the engine that is trained beside it, where they can be shared (`lent`),
    else over a module of its own, read from `model`."""
    wanted = engine_config(config, model)
    device = resolve_device(wanted)
    dtype = compute_dtype(wanted, device)
    options: dict[str, Any] = {
        "pad_token_id": tokenizer.pad_token_id or 0,
        "seed": config.seed,
        "admit": admission(config),
        "routed_experts": wanted.routing_replay,
    }
    shared = No("nothing is trained beside it") if trained is None else lent(config, trained)
    module = load_model(wanted, dtype=dtype, device=device) if isinstance(shared, No) else empty_module(wanted, dtype)
    choose_torch_operations(module)
    if isinstance(shared, No):
        return NativeEngine(module, version=version, **options)
    return SharingEngine(module, shared, version, **options)


def lent(config: GrpoConfig, trained: TrainEngine) -> SharedWeights | No:
    """Return the engine's weights for a sampler in its process; or why that one has a copy, the same on every rank."""
    reason = kept_apart(config.engine, config.cluster)
    return shared_weights(trained) if reason is None else No(reason)


def weights_line(config: GrpoConfig, sampler: object, trained: TrainEngine) -> str | None:
    """Return what a run says once of where its own sampler has the weights; None of any other sampler."""
    if isinstance(sampler, SharingEngine):
        return "the sampler computes with training's weights in place"
    if not isinstance(sampler, NativeEngine):
        return None
    found = lent(config, trained)
    why = found.reason if isinstance(found, No) else "its module was given"
    return f"the sampler has a copy of the weights: {why}"


def native_dtype(config: GrpoConfig, model: Path) -> str:
    """Return what that module computes in."""
    wanted = engine_config(config, model)
    return str(compute_dtype(wanted, resolve_device(wanted))).removeprefix("torch.")


def engine_config(config: GrpoConfig, model: Path) -> EngineConfig:
    """Return the training engine's settings, with the model to start from."""
    return replace(config.engine, model=str(model), temperature=config.sampling.temperature)

"""The app's own sampler: the native engine over a module of its own, read from a model's directory."""

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from apps.grpo.config import GrpoConfig
from engines import EngineConfig
from engines.loading import compute_dtype, load_model, resolve_device
from rollout import NativeEngine
from rollout.config import Admission


def admission(config: GrpoConfig) -> Admission:
    """When requests begin: as asked; else in rounds, but for fully_async, whose answers wait for nobody.

    In rounds a run that is killed and resumed ends with the bits of one that was not. At any step no answer waits for
    the longest of those before it, and which rows share a step, hence the last bits, hangs on how fast threads are.
    """
    if config.cluster.rollout.admit is not None:
        return config.cluster.rollout.admit
    return "any_step" if config.cluster.schedule.mode == "fully_async" else "rounds"


def native_engine(config: GrpoConfig, model: Path, tokenizer: PreTrainedTokenizerBase, version: int) -> NativeEngine:
    """The sampler over a module of its own, read from `model`."""
    wanted = engine_config(config, model)
    device = resolve_device(wanted)
    module = load_model(wanted, dtype=compute_dtype(wanted, device), device=device)
    pad = tokenizer.pad_token_id or 0
    return NativeEngine(
        module,
        pad_token_id=pad,
        seed=config.seed,
        version=version,
        admit=admission(config),
        routed_experts=wanted.routing_replay,
    )


def native_dtype(config: GrpoConfig, model: Path) -> str:
    """What that module computes in."""
    wanted = engine_config(config, model)
    return str(compute_dtype(wanted, resolve_device(wanted))).removeprefix("torch.")


def engine_config(config: GrpoConfig, model: Path) -> EngineConfig:
    """The training engine's settings, with the model to start from."""
    return replace(config.engine, model=str(model), temperature=config.sampling.temperature)

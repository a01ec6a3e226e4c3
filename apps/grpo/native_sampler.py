"""The app's own sampler: the native engine over a module of its own, read from a model's directory."""

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from apps.grpo.config import GrpoConfig
from engines import EngineConfig
from engines.loading import compute_dtype, load_model, resolve_device
from rollout import NativeEngine
from rollout.config import Admission


def native_engine(
    config: GrpoConfig, model: Path, tokenizer: PreTrainedTokenizerBase, version: int, admit: Admission = "rounds"
) -> NativeEngine:
    """The sampler over a module of its own, read from `model`; in rounds unless asked otherwise."""
    wanted = engine_config(config, model)
    device = resolve_device(wanted)
    module = load_model(wanted, dtype=compute_dtype(wanted, device), device=device)
    pad = tokenizer.pad_token_id or 0
    # In rounds: a run that is killed and resumed ends with the bits of one that was not.
    return NativeEngine(
        module,
        pad_token_id=pad,
        seed=config.seed,
        version=version,
        admit=admit,
        routed_experts=wanted.routing_replay,
    )


def engine_config(config: GrpoConfig, model: Path) -> EngineConfig:
    """The training engine's settings, with the model to start from."""
    return replace(config.engine, model=str(model), temperature=config.sampling.temperature)

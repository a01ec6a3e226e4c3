"""Build a rollout engine."""

from pathlib import Path

from torch import nn

from rollout.backends import ENGINE_BACKENDS, load
from rollout.capability import refuse_unsupported
from rollout.config import RolloutConfig
from rollout.engine import RolloutEngine


def build_rollout(
    config: RolloutConfig, model: nn.Module | Path | None = None, *, pad_token_id: int = 0, version: int = 0
) -> RolloutEngine:
    """Build the engine of a configuration.

    `model` is the module that the native engine samples from, on its device (the twin of a training engine: it takes
    new weights in place), the Hugging Face directory that vLLM starts from, or None where a server has its model;
    `version` is the number of its weights. What is not supported is refused here.

    Raises:
        ValueError: the backend is not there, it lacks its model, or it can't do what is asked.
        RuntimeError: vLLM's process died while it was started.
    """
    refuse_unsupported(config)
    engine: RolloutEngine = load(ENGINE_BACKENDS[config.backend].builder)(config, model, pad_token_id, version)
    return engine

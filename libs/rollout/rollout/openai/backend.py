"""Build the engine behind an OpenAI-compatible server, for `rollout.backends`."""

from typing import Any

from rollout.config import RolloutConfig
from rollout.openai.engine import OpenAIEngine


def build(config: RolloutConfig, model: Any, pad_token_id: int, version: int) -> OpenAIEngine:
    """Return an engine behind the server, which has a model of its own.

    Raises:
        ValueError: `model` is given, or the server does not respond as it must.
    """
    del pad_token_id
    if model is not None:
        raise ValueError("backend 'openai' samples from what its server has: hand build_rollout no model")
    return OpenAIEngine(config, version)

"""Build the vLLM engine of a configuration, for `rollout.backends`."""

from pathlib import Path
from typing import Any

from rollout.config import RolloutConfig
from rollout.vllm.engine import VllmEngine
from rollout.vllm.node import vllm_engine


def build(config: RolloutConfig, model: Any, pad_token_id: int, version: int) -> VllmEngine:
    """Return an engine of the model in a directory.

    Raises:
        ValueError: there is no directory, no vLLM, or it can't do what is asked.
        RuntimeError: its process died before it was ready.
    """
    del pad_token_id
    if not isinstance(model, Path):
        raise ValueError("backend 'vllm' reads a model's directory: hand build_rollout its pathlib.Path")
    return vllm_engine(model, config, version)

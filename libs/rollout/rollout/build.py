"""Build a rollout engine."""

from pathlib import Path

from torch import nn

from rollout.capability import refuse_unsupported
from rollout.config import RolloutConfig
from rollout.engine import RolloutEngine
from rollout.native.engine import NativeEngine
from rollout.vllm.engine import VllmEngine


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
    if config.backend == "vllm":
        if not isinstance(model, Path):
            raise ValueError("backend 'vllm' reads a model's directory: hand build_rollout its pathlib.Path")
        return VllmEngine(model, config, version)
    if config.backend == "openai":
        if model is not None:
            raise ValueError("backend 'openai' samples from what its server has: hand build_rollout no model")
        from rollout.openai.engine import OpenAIEngine  # httpx2, which the others do without

        return OpenAIEngine(config, version)
    if not isinstance(model, nn.Module):
        raise ValueError("backend 'native' samples from a module in this process: hand build_rollout its model")
    return NativeEngine(
        model,
        pad_token_id=pad_token_id,
        max_batch=config.max_batch,
        max_length=config.max_length,
        seed=config.seed,
        version=version,
        compact_below=config.compact_below,
        prefill_tokens=config.prefill_tokens,
        decoder=config.decoder,
        on_commit=config.on_commit,
        admit=config.admit,
        keep_tokens=config.keep_tokens,
        routed_experts=config.routed_experts,
    )

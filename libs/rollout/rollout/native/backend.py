"""Build the native engine of a configuration, for `rollout.backends`."""

from typing import Any

from torch import nn
from transformers import AutoTokenizer

from rollout.config import RolloutConfig
from rollout.native.engine import NativeEngine


def build(config: RolloutConfig, model: Any, pad_token_id: int, version: int) -> NativeEngine:
    """Return an engine over a module of this process.

    Raises:
        ValueError: there is no module.
    """
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
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        routed_experts=config.routed_experts,
        tokenizer=None if config.tokenizer is None else AutoTokenizer.from_pretrained(config.tokenizer),
    )

"""The reference model, which training leaves as it is, and to which a KL penalty holds the policy.

It is a frozen engine beside the trained one, or the base under an adapter, which costs no second model. The frozen
engine is on its device only while it scores, and in host memory otherwise. Where it computes in bfloat16 its weights
are kept in bfloat16, two bytes a parameter, and its log-probs are those of float32 weights bit for bit, since a layer
rounds its weights to that dtype anyway. Where it computes in float32 (on a CPU, by default) they stay float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from engines.config import EngineConfig
from engines.loading import DTYPES, compute_dtype, resolve_device
from engines.lora_config import LoraConfig
from engines.protocol import TrainEngine


def reference_config(config: EngineConfig) -> EngineConfig:
    """Return the settings of the reference model beside an engine with these: weights in the dtype of its layers.

    Replicated weights have float32 values; a reference model has none, and is sharded over several ranks.
    """
    if config.backend != "fsdp2":  # Megatron keeps a frozen model's weights in the dtype of its layers by itself
        return replace(config, lora=LoraConfig(), mtp_loss_scaling_factor=None)
    narrow = DTYPES["bfloat16"] in (compute_dtype(config, resolve_device(config)), DTYPES[config.master_dtype])
    return replace(
        config,
        master_dtype="bfloat16" if narrow else "float32",
        moments_dtype="auto",
        optimizer="adamw",
        muon_momentum=EngineConfig.muon_momentum,
        weights="auto" if config.weights == "replicated" else config.weights,
        lora=LoraConfig(),
        mtp_loss_scaling_factor=None,
    )


@contextmanager
def base_policy(engine: Any) -> Iterator[TrainEngine]:
    """Yield an engine that scores by the reference model inside the block: `engine.reference`, or `engine` by its base.

    A reference model comes to its device for the block, and leaves it afterwards. Collective. ValueError where the
    engine has neither.
    """
    reference = engine.reference
    if reference is None:
        counts = engine.scored_counts
        try:
            with engine.executor.without_adapters():
                yield engine
        finally:
            engine.scored_counts = counts  # those of the base are not the policy's
        return
    try:
        reference.onload()
        yield reference
    finally:
        reference.offload()

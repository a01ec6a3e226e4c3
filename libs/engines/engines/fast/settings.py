"""What settings alone say of the fast path, which a plan reads too: nothing slow is imported."""

from engines.config import EngineConfig

KEPT_BYTES = 2**30
"""Bytes of logits that are kept from forward to backward (`engines.fast.fused_log_probs`)."""


def settings_refusal(config: EngineConfig) -> str | None:
    """Return why layers cannot be compiled under these settings, on any machine; None where they can."""
    if config.vision != "off" and config.compile != "on":
        return "layers behind a vision tower are compiled where compile='on' asks for it"
    if config.lora.target_parameters:
        return "experts with adapters are not compiled: leave lora.target_parameters out"
    if config.activation_offload:
        return "the inputs of compiled layers are not moved to the host"
    if config.batching != "packed":
        return "layers are compiled for packed batches alone: set batching='packed'"
    if config.context_parallel not in ("off", "static:1"):
        return "layers whose ranks share sequences are not compiled"
    return None


def traced_settings_refusal(config: EngineConfig) -> str | None:
    """Return why layers cannot be compiled as they are (`engines.fast.traced_layers`) under these settings."""
    if config.activation_offload:
        return "the inputs of compiled layers are not moved to the host"
    return (
        "layers are compiled for packed batches alone: set batching='packed'" if config.batching != "packed" else None
    )


def replication_refusal(config: EngineConfig) -> str | None:
    """Return why ranks cannot hold the weights whole under these settings, on any machine; None where they can."""
    if config.shard_ranks is not None:
        return "shard_ranks asks for sharded weights: leave it out"
    if config.vision != "off":
        return "a vision tower is sharded: set weights='sharded'"
    if config.lora.rank:
        return "adapters and the weights under them are sharded: set weights='sharded'"
    if config.optimizer != "adamw":
        return "replicated weights are updated by AdamW: set weights='sharded', or optimizer='adamw'"
    if config.moments_dtype != "auto":
        return "replicated weights keep float32 moments: set moments_dtype='auto', or weights='sharded'"
    if config.parameters_on_host:
        return "replicated weights are on the device: set weights='sharded'"
    if config.optimizer_on_host:
        return "replicated weights keep their states on the device: set weights='sharded'"
    if config.master_dtype != "float32":
        return "replicated weights keep float32 masters: set master_dtype='float32', or weights='sharded'"
    return None

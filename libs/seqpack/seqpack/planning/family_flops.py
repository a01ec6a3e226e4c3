"""Reads the layers of a Hugging Face config, family by family; what is not in the table is refused by name.

A family is added by its model_type in `READERS`, with a line in the test that holds it against torch's counter of
FLOPs on the stock model.
"""

from collections.abc import Callable, Sequence
from typing import Any

from seqpack.planning.flops import LayerFlops, ModelFlops, delta_net, experts, full_attention, latent_attention, mlp

Reader = Callable[[Any, int, str], LayerFlops]


def model_flops(config: Any) -> ModelFlops:
    """Count the text part of a Hugging Face config, by layer; vision towers and multi-token prediction are not counted.

    ValueError for a model type or layer type that is not known, and for fields that contradict it.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kind = getattr(text, "model_type", None)
    if kind not in READERS:
        raise ValueError(
            f"no count of FLOPs for model_type {kind!r}; known are {', '.join(sorted(READERS))}. Build "
            "SequenceCost(per_token, attention) or ModelFlops(layers, head) from your own numbers instead"
        )
    layers = tuple(READERS[kind](text, index, name) for index, name in enumerate(layer_types(text)))
    return ModelFlops(layers, head=2.0 * text.hidden_size * text.vocab_size)


def layer_types(config: Any) -> Sequence[str]:
    """Return the kind of each layer; ValueError for one that is neither full, sliding nor linear attention."""
    types = getattr(config, "layer_types", None)
    if types is None:
        sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        types = ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers
    for layer, kind in enumerate(types):
        if kind not in ("full_attention", "sliding_attention", "linear_attention"):
            raise ValueError(f"no cost model for layer_types[{layer}] = {kind!r}")
        if kind == "sliding_attention" and not getattr(config, "sliding_window", None):
            raise ValueError(f"layer_types[{layer}] is 'sliding_attention', but sliding_window is not set")
    if len(types) != config.num_hidden_layers:
        raise ValueError(f"layer_types names {len(types)} layers, num_hidden_layers is {config.num_hidden_layers}")
    return list(types)


def _dense(config: Any, index: int, kind: str) -> LayerFlops:
    """Read a layer of Llama and models like it."""
    del index
    return _attention(config, kind, mlp(config.hidden_size, config.intermediate_size))


def _mixture(config: Any, index: int, kind: str) -> LayerFlops:
    """Read a layer of Mixtral, Qwen3-MoE or gpt-oss: router and experts in every layer that is not named dense."""
    return _attention(config, kind, _sparse(config, index))


def _hybrid(config: Any, index: int, kind: str) -> LayerFlops:
    """Read a layer of dense Qwen3.5: gated attention or a gated delta net."""
    del index
    return _gated_or_delta(config, kind, mlp(config.hidden_size, config.intermediate_size))


def _hybrid_mixture(config: Any, index: int, kind: str) -> LayerFlops:
    """Read a layer of Qwen3-Next or Qwen3.5-MoE: as `_hybrid`, with experts, one of them shared and gated."""
    return _gated_or_delta(config, kind, _sparse(config, index))


def _deepseek(config: Any, index: int, kind: str) -> LayerFlops:
    """Read a layer of DeepSeek-V2 or V3: latent attention; the first layers dense, the others with shared experts."""
    if kind != "full_attention":
        raise ValueError(f"{config.model_type} has latent attention alone, layer_types[{index}] is {kind!r}")
    feed_forward = mlp(config.hidden_size, config.intermediate_size)
    if index >= config.first_k_dense_replace:
        width = config.moe_intermediate_size
        feed_forward = experts(
            config.hidden_size,
            width,
            config.n_routed_experts,
            config.num_experts_per_tok,
            shared=width * (config.n_shared_experts or 0),
        )
    return latent_attention(
        config.hidden_size,
        config.num_attention_heads,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        config.kv_lora_rank,
        config.q_lora_rank,
        feed_forward,
    )


def _attention(config: Any, kind: str, feed_forward: float, gated: bool = False) -> LayerFlops:
    if kind == "linear_attention":
        raise ValueError(f"{config.model_type} has no linear attention, but layer_types names it")
    heads = config.num_attention_heads
    return full_attention(
        config.hidden_size,
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        feed_forward,
        gated=gated,
        window=config.sliding_window if kind == "sliding_attention" else None,
    )


def _gated_or_delta(config: Any, kind: str, feed_forward: float) -> LayerFlops:
    if kind != "linear_attention":
        return _attention(config, kind, feed_forward, gated=True)
    return delta_net(
        config.hidden_size,
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
        feed_forward,
    )


def _sparse(config: Any, index: int) -> float:
    """Return FLOPs a token of a layer's experts, or of its MLP where the config makes the layer dense."""
    dense = index in (getattr(config, "mlp_only_layers", None) or ())
    if dense or (index + 1) % (getattr(config, "decoder_sparse_step", None) or 1):
        return mlp(config.hidden_size, config.intermediate_size)
    return experts(
        config.hidden_size,
        getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        getattr(config, "num_experts", None) or config.num_local_experts,
        config.num_experts_per_tok,
        shared=getattr(config, "shared_expert_intermediate_size", None) or 0,
        shared_gate=True,
    )


READERS: dict[str, Reader] = {
    "llama": _dense,
    "mistral": _dense,
    "qwen2": _dense,
    "qwen3": _dense,
    "gemma2": _dense,
    "gemma3_text": _dense,
    "mixtral": _mixture,
    "qwen3_moe": _mixture,
    "gpt_oss": _mixture,
    "qwen3_5_text": _hybrid,
    "qwen3_next": _hybrid_mixture,
    "qwen3_5_moe_text": _hybrid_mixture,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
"""How to read one layer, by the model_type of the text config."""

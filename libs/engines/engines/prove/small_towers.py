"""A multi-modal config in small: its text part as `small_config` makes it, and the other parts with few features."""

import copy
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from engines.prove.small_config import HEADS, HIDDEN, shrink_config

_TOWER_DEPTHS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers", "n_layers", "num_blocks")
_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "width", "embedding_dim", "encoder_hidden_size"), HIDDEN),
    **dict.fromkeys(("mm_hidden_size", "output_dim", "projection_dim", "out_hidden_size", "hidden_dim"), HIDDEN),
    **dict.fromkeys(("output_hidden_size", "text_hidden_size", "vision_output_dim", "adapter_hidden_dim"), HIDDEN),
    **dict.fromkeys(("num_attention_heads", "num_heads", "attention_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "n_heads"), HEADS),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "mlp_dim", "ffn_dim", "projector_hidden_size"), 96),
    **dict.fromkeys(_TOWER_DEPTHS, 2),
    **dict.fromkeys(("head_dim",), HIDDEN // HEADS),
    **dict.fromkeys(("hidden_size_global", "adapter_in_dim", "adapter_out_dim", "adapter_input_size"), HIDDEN),
    **dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"), HIDDEN),
    **dict.fromkeys(("base_channels", "downsample_hidden_size"), 32),
    **dict.fromkeys(("moe_intermediate_size", "ffn_hidden_size"), 32),
    "kv_n_heads": 2,
    **dict.fromkeys(("vocab_size", "num_embeddings", "position_embedding_size"), HIDDEN),
    **dict.fromkeys(("output_channels", "projector_input_dim", "projector_output_dim"), HIDDEN),
}
_BETWEEN: Mapping[str, int] = {
    **dict.fromkeys(("vision_hidden_size", "mm_hidden_size", "out_hidden_size"), HIDDEN),
    **dict.fromkeys(("hidden_size", "vocab_size"), HIDDEN),
    **dict.fromkeys(("projector_hidden_size", "alignment_intermediate_size"), 96),
    "merged_hidden_size": 4 * HIDDEN,
    "latent_query_num": 8,
}
"""Sizes of a multi-modal config itself."""


def shrink_whole(config: Any) -> Any:
    """Return a multi-modal config in small; its switches are kept, those of the other parts too."""
    return with_text(config, shrink_config(config).config)


def with_text(config: Any, text: Any) -> Any:
    """Return a multi-modal config with another text config, and its other parts in small."""
    whole = text if config.get_text_config() is config else copy.deepcopy(config)
    _shrink(whole, whole.get_text_config(), text)
    for name in () if whole is text else _BETWEEN:
        if isinstance(getattr(whole, name, None), int):
            setattr(whole, name, min(getattr(whole, name), _BETWEEN[name]))
    return whole


def _shrink(config: Any, before: Any, text: Any) -> None:
    """Put the small text config in its place, and shrink the other parts."""
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is before:
            setattr(config, name, text)
        elif isinstance(part, PretrainedConfig):
            _shrink_tower(part)
            _shrink(part, before, text)


def _shrink_tower(config: Any) -> None:
    before = config.to_dict()
    depths = {before[name] for name in _TOWER_DEPTHS if isinstance(before.get(name), int)}
    if own := before.get("per_layer_config"):
        config.per_layer_config = {int(n): one for n, one in own.items() if int(n) < _SIZES["num_layers"]}
    for name, value in before.items():
        if isinstance(value, list) and len(value) in depths and len(value) > _SIZES["num_layers"]:
            setattr(config, name, value[: _SIZES["num_layers"]])
        if isinstance(value, list) and name.endswith("feature_layer"):
            setattr(config, name, [place % _SIZES["num_layers"] for place in range(len(value))])
        if isinstance(value, int) and not isinstance(value, bool) and name in _SIZES:
            setattr(config, name, min(value, _SIZES[name]))
        if name == "mlp_ratio" and isinstance(value, int | float) and "intermediate_size" in before:
            config.intermediate_size = int(value * config.hidden_size)  # its class computes it anew
        if isinstance(value, list) and "index" in name and all(isinstance(one, int) for one in value):
            setattr(config, name, sorted({min(one, 1) for one in value})[:1])

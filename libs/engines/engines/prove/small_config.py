"""A config in small: one layer of each kind, few features, every switch kept, every threshold lowered so that short
sequences cross it.

Fields are known by the names that transformers' configs share. A field that is not named keeps its value.
"""

import copy
import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HIDDEN, HEADS, HEAD_DIM, VOCABULARY, LAYERS = 64, 4, 16, 64, 4
LONGEST = 128
"""Positions of the small model."""
CROSSED = 24
"""Positions of one whose rotary embedding depends on the longest sequence of a call: a threshold like others."""
BY_POSITION = frozenset(["default", "linear", "llama3", "yarn", "proportional"])
"""Rotary embeddings whose angles depend on a token's position alone."""

_STATE_HEADS = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
_GROUPS = {"n_group": 2, "topk_group": 1, "moe_topk_group": 1, "index_topk_blocks": 2, "hc_sinkhorn_iters": 2}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SIZES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "hidden_dim", "embedding_size", "embed_dim"), HIDDEN),
    "embedding_dim": HIDDEN,
    "lru_width": HIDDEN,
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "attention_head_dim", "v_head_dim", "qk_nope_head_dim", "global_head_dim"), HEAD_DIM),
    **dict.fromkeys(
        ("qk_rope_head_dim", "index_head_dim", "kv_lora_rank", "linear_key_head_dim", "linear_head_dim"), HEAD_DIM
    ),
    **dict.fromkeys(("linear_value_head_dim", "ssm_state_size", *_STATE_HEADS), HEAD_DIM),
    **dict.fromkeys(("mamba_d_state", "state_size"), HEAD_DIM),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads"), HEADS),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "d_ff", "ffn_hidden_size"), 96),
    "intermediate_size_mlp": 96,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size", "dense_intermediate_size"), 32),
    **dict.fromkeys(("q_lora_rank", "o_lora_rank", "hidden_size_per_layer_input"), 24),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "codebook_size"), VOCABULARY),
    **dict.fromkeys(("linear_num_key_heads", "mamba_n_groups", "n_groups"), 2),
    **dict.fromkeys(("qk_head_dim",), 2 * HEAD_DIM),
    **dict.fromkeys(EXPERTS, 8),
    **dict.fromkeys(("emb_dim", "moe_hidden_size"), HIDDEN),
    **dict.fromkeys(("attention_heads",), HEADS),
    "encoder_hash_byte_group_vocab": VOCABULARY,
    "shared_experts_intermediate_size": 32,
    "o_groups": 2,
    "rotary_dim": HEAD_DIM,
    "mamba_d_ssm": 2 * HIDDEN,
    "index_n_heads": 16,  # with few of them scores are often all zero, and the choice of keys is arbitrary
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "block_size": 8,
}
_OWN_SIZES = {"head_dim": 2 * HEAD_DIM, "num_key_value_heads": 1, "num_attention_heads": HEADS // 2}
"""Sizes of single layers (`per_layer_config`): others than those of the rest."""
CHOSEN = (
    "num_experts_per_tok",
    "top_k_experts",
    "num_experts_per_token",
    "moe_topk",
    "top_k",
    "moe_k",
    "num_selected_experts",
)
_KINDS = ("layers_block_type", "layer_types")
"""Fields with a kind for each layer, where no field says how many layers there are."""
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "layers")
THRESHOLDS: Mapping[str, int] = {
    "sliding_window": 8,
    "attention_window": 8,
    "attention_window_size": 8,
    "local_attention": 8,
    "window_size": 8,
    "attention_chunk_size": 12,
    "floor_scale": 10,
    "index_topk": 6,
    "original_max_position_embeddings": 16,
    **dict.fromkeys(("keep_window_size", "index_block_size", "chunk_size", "mamba_chunk_size", "block_size"), 8),
    **dict.fromkeys(("conv_kernel", "conv_L_cache", "conv1d_width", "mamba_d_conv", "linear_conv_kernel_dim"), 8),
    **dict.fromkeys(("short_conv_kernel_size", "compressed_sparse_attention"), 8),
    "heavily_compressed_attention": 8,
}
"""Lengths at which a computation may change: windows, blocks, kernels of convolutions, tokens of a compressed key."""
_ROTATIONS = {"rope_theta": 100.0, "beta_fast": 1.0, "beta_slow": 0.1}
"""Rotary embeddings turn slower at most: lower values move the angles of short sequences and of few features."""
CAP = 1.5
"""Bound of logits and scores in small: they reach it."""
_CAPS = ("softcapping", "soft_cap", "softcap", "swiglu_limit")
_RATES = "compress_rates"
"""Tokens of a compressed key by kind of layer (DeepSeek-V4)."""
_LISTS_OF_LAYERS = ("moe_layers", "mlp_only_layers", "full_attn_idxs", "attn_layer_indices", "hybrid_layer_ids")
"""Fields that name layers by their number."""
_EXTRACTED = "linear_attn_config"
"""Sizes as checkpoints of Kimi-Linear have them, which its config has by other names."""
_SOURCES = "_source_layers"
"""End of the names of fields with the number of another layer for each layer."""
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")


@dataclass(frozen=True)
class SmallConfig:
    """A config in small, with what was changed: (field, value before, value after)."""

    config: Any
    changes: tuple[tuple[str, Any, Any], ...]


def shrink_config(config: Any) -> SmallConfig:
    """Return the text config in small; ValueError where its sizes do not fit together afterwards."""
    text = copy.deepcopy(config.get_text_config())
    before = text.to_dict()
    depth = _depth(before)
    kept = _layers(before, _count(before[depth])) if depth is not None else []
    values = {name: value for name, value in _values(before, depth, kept) if before[name] != value}
    values |= _depending(before, kept, values)
    vars(text).pop(_EXTRACTED, None)
    for name, value in values.items():
        setattr(text, name, value)
    for name, most in _GROUPS.items():
        if name not in before and isinstance(value := getattr(text, name, None), int):  # by another name
            setattr(text, name, min(value, most))
    if own := _own_fields(before, kept):
        text.per_layer_config = {
            place: {name: _own_size(name, value, fields) for name, value in fields.items()}
            | {size: text.head_dim - HEAD_DIM for size in _heads_left(before, fields)}  # noqa: C420  not every config has one head_dim
            for place, fields in own.items()
        }
    _shrink_rope(text)
    after = text.to_dict()
    return SmallConfig(
        text, tuple((name, before.get(name), after[name]) for name in after if after[name] != before.get(name))
    )


def _heads_left(before: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the size of a single layer that is what rotary embeddings leave of a head (Dots3), if it is."""
    turned, left = fields.get("qk_rope_head_dim", before.get("qk_rope_head_dim")), fields.get("qk_nope_head_dim")
    return ("qk_nope_head_dim",) if turned and left and left + turned == before.get("head_dim") else ()


def _own_size(name: str, value: Any, fields: Mapping[str, Any]) -> Any:
    """Return a size of a single layer; as many heads of keys as of queries where it has them."""
    if name == "num_key_value_heads" and value == fields.get("num_attention_heads"):
        name = "num_attention_heads"
    return min(value, _OWN_SIZES.get(name, SIZES.get(name, value)))


def _depending(before: Mapping[str, Any], kept: Sequence[int], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that others determine."""
    sizes: dict[str, Any] = {}
    if expand := before.get("mamba_expand", before.get("expand")):
        width = values.get("mamba_d_ssm", before.get("mamba_d_ssm")) or int(expand) * HIDDEN
        size = next((before[name] for name in _STATE_HEADS if isinstance(before.get(name), int)), HEAD_DIM)
        names = ("mamba_n_heads", "mamba_num_heads", "num_heads")
        sizes |= {name: width // min(size, HEAD_DIM) for name in names if name in values}
    if before.get("attention_hidden_size"):  # Zamba's attention sees the hidden states twice
        sizes |= {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HIDDEN // HEADS}
    if shared := before.get("num_kv_shared_layers"):
        depth = _depth(before)
        first = _count(before[depth]) - shared if depth is not None else 0
        sizes["num_kv_shared_layers"] = sum(layer >= first for layer in kept)
    for part in _ropes(before):
        factor, turned, size = part.get("partial_rotary_factor"), before.get("qk_rope_head_dim"), before.get("head_dim")
        if factor and turned and size and int(size * factor) == turned:
            sizes["head_dim"] = int(HEAD_DIM / factor)
    return sizes


def layer_kinds(config: Any) -> tuple[Any, list[int]]:
    """Return the text config at its own width with one layer of each kind, and which layers of the whole these are.

    The kinds are those of the config's own lists, and layers before and behind `first_k_dense_replace`; the last one
    is kept too.
    """
    text = copy.deepcopy(config.get_text_config())
    before = text.to_dict()
    depth = _depth(before)
    if depth is None:
        raise ValueError(f"{text.model_type}: no field of its config says how many layers there are")
    kept = _layers(before, _count(before[depth]), least=2)
    if dense := before.get("first_k_dense_replace"):
        kept = sorted({*kept, min(dense, _count(before[depth]) - 1)})
        text.first_k_dense_replace = sum(layer < dense for layer in kept)
    for name, value in before.items():
        if isinstance(value, list) and name in _LISTS_OF_LAYERS:
            setattr(text, name, [place for place, layer in enumerate(kept) if layer in value])
        elif isinstance(value, list) and len(value) == _count(before[depth]):
            setattr(text, name, [value[layer] for layer in kept])
    if isinstance(before[depth], int):
        setattr(text, depth, len(kept))
    if own := _own_fields(before, kept):
        text.per_layer_config = own
    return text, kept


def _depth(before: Mapping[str, Any]) -> str | None:
    """Return the field that says how many layers there are: their number, or their kinds."""
    numbers = [name for name in _DEPTHS if isinstance(before.get(name), int)]
    return next(iter([*numbers, *(name for name in _KINDS if isinstance(before.get(name), list))]), None)


def _count(depth: Any) -> int:
    return len(depth) if isinstance(depth, list) else int(depth)


def _own_fields(before: Mapping[str, Any], kept: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the fields that single layers have of their own, by place among those that are kept."""
    own = {int(layer): fields for layer, fields in (before.get("per_layer_config") or {}).items()}
    return {place: own[layer] for place, layer in enumerate(kept) if layer in own}


def thresholds(config: Any) -> dict[str, int]:
    """Return the lengths at which a text config's computation may change, by field."""
    values = config.get_text_config().to_dict()
    rates = values.get(_RATES) or {}
    parts = [values, *_ropes(values), rates]
    crossed = {
        name: part[name] for part in parts for name in THRESHOLDS if isinstance(part.get(name), int) and part[name] > 1
    }
    if rates and "index_topk" in crossed:
        crossed["index_topk"] *= min(rates.values())  # it counts compressed keys
    if _by_length(values):
        crossed |= {name: values[name] for name in _POSITIONS if isinstance(values.get(name), int)}
    return crossed


def _ropes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameters of rotary embeddings: of all layers, or of each kind."""
    rope = values.get("rope_parameters") or {}
    return [rope, *(part for part in rope.values() if isinstance(part, dict))]


def _by_length(values: Mapping[str, Any]) -> bool:
    """Return whether some rotary embedding depends on more than a token's position."""
    return any(part.get("rope_type", "default") not in BY_POSITION for part in _ropes(values))


def _values(before: Mapping[str, Any], depth: str | None, kept: Sequence[int]) -> Iterator[tuple[str, Any]]:
    heads = next(
        (before[name] for name in ("num_attention_heads", "n_head") if isinstance(before.get(name), int)), HEADS
    )
    for name, value in before.items():
        if isinstance(value, bool):
            continue
        if isinstance(value, list) and name in _LISTS_OF_LAYERS:
            yield name, [place for place, layer in enumerate(kept) if layer in value]
        elif name.endswith(_SOURCES) and isinstance(value, list):
            yield name, [kept.index(value[layer]) if value[layer] in kept else n for n, layer in enumerate(kept)]
        elif isinstance(value, list) and depth is not None and len(value) == _count(before[depth]):
            each = [value[layer] for layer in kept]
            yield name, [min(one, SIZES[name]) for one in each] if name in SIZES else each
        if isinstance(value, dict) and name == _RATES:
            yield name, {kind: min(rate, THRESHOLDS[kind]) for kind, rate in value.items()}
        if isinstance(value, float) and name.endswith(_CAPS):
            yield name, min(value, CAP)
        if not isinstance(value, int):
            continue
        if name in SIZES:
            yield name, min(value, SIZES[name])
        elif name == "num_key_value_heads":
            yield name, HEADS if value == heads else 1 if value == 1 else 2
        elif name in CHOSEN:
            yield name, min(value, 2)
        elif name == depth:
            yield name, len(kept)
        elif name in THRESHOLDS:
            yield name, min(value, THRESHOLDS[name])
        elif name in _POSITIONS:
            yield name, min(value, CROSSED if _by_length(before) else LONGEST)
        elif name in _GROUPS:
            yield name, min(value, _GROUPS[name])
        elif name.endswith(("_layer_period", "_layer_offset")):
            yield name, min(value, 2 if name.endswith("period") else 1)
        elif name == "first_k_dense_replace":
            yield name, min(value, 1)
        elif name == "moe_layer_end_index":
            yield name, min(value, len(kept) - 1)
        elif name in ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id") and value >= VOCABULARY:
            yield name, {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 3}[name]


def _layers(before: Mapping[str, Any], depth: int, least: int = LAYERS) -> list[int]:
    """Return the layers that are kept: the first of each kind by the config's own lists, at least `least` of them."""
    named = [before[name] for name in _LISTS_OF_LAYERS if isinstance(before.get(name), list)]
    lists = [
        *(
            [source == layer for layer, source in enumerate(v)] if n.endswith(_SOURCES) else v
            for n, v in before.items()
            if isinstance(v, list) and len(v) == depth and n not in _LISTS_OF_LAYERS
        ),
        *([layer in value for layer in range(depth)] for value in named if value),
        [_own_fields(before, [layer]) for layer in range(depth)] if before.get("per_layer_config") else [],
    ]
    lists = [one for one in lists if one]
    seen: dict[str, int] = {}
    for layer in range(depth):
        kind = repr([one[layer] for one in lists])
        if "'hybrid'" in kind and kind in seen:  # Zamba's share a block: two of them
            kind = f"second {kind}"
        seen.setdefault(kind, layer)
    if not lists:
        return list(range(min(depth, least)))
    return sorted({*seen.values(), *range(min(depth, least - len(seen) + 1)), depth - 1})


def _shrink_rope(text: Any) -> None:
    values = text.to_dict()
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict):
        return
    nested = [one for one in rope.values() if isinstance(one, dict)]
    for part in [rope, *nested]:
        width = values.get("qk_rope_head_dim") or values.get("head_dim") or HEAD_DIM
        half = int(width * part.get("partial_rotary_factor", values.get("partial_rotary_factor") or 1.0)) // 2
        for name, bound in _ROTATIONS.items():
            if isinstance(part.get(name), int | float):
                part[name] = min(float(part[name]), bound)
        if isinstance(part.get("original_max_position_embeddings"), int):
            part["original_max_position_embeddings"] = THRESHOLDS["original_max_position_embeddings"]
        for name in ("short_factor", "long_factor"):
            if isinstance(part.get(name), list):
                part[name] = [part[name][i * len(part[name]) // half] for i in range(half)]
        if isinstance(sections := part.get("mrope_section") or _own_sections(text, part, nested), list):
            part["mrope_section"] = _sections(sections, half)


def _sections(sections: Sequence[int], half: int) -> list[int]:
    """Return sections in the same proportions that add up to `half`, none of them empty."""
    exact = [size * half / sum(sections) for size in sections]
    scaled = [max(1, int(size)) for size in exact]
    for _ in range(half - sum(scaled)):
        most = max(range(len(scaled)), key=lambda place: exact[place] - scaled[place])
        scaled[most] += 1
    return scaled


def _own_sections(text: Any, part: Any, nested: Sequence[Any]) -> list[int] | None:
    """Return the sections that modelling code takes where the config names none: they are those of the true width.

    Where each kind of layer has rotary embeddings of its own (`nested`), each has sections.
    """
    if nested and part not in nested:
        return None
    module = importlib.import_module(type(text).__module__.replace(".configuration_", ".modeling_"))
    match = re.search(r"""get\("mrope_section", (\[[\d, ]+\])\)""", inspect.getsource(module))
    return None if match is None else json.loads(match[1])

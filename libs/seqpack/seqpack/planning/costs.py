"""What a sequence costs by its length: FLOPs of a forward pass, from a Hugging Face config (backward is twice that)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from seqpack.planning.checks import check_positive_int

DENSE = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "qwen3_5_text"})
MIXTURES = frozenset({"mixtral", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"})
GATED_QUERY = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})  # q_proj also makes the output gate
GDN_CHUNK = 64


@dataclass(frozen=True)
class SequenceCost:
    """Forward FLOPs of a sequence of `length` tokens: `cost(length)`.

    `per_token`: matrix products with the parameters a token meets (of a mixture, the active ones), the causal
    convolutions and the head. `attention`: (window, FLOPs of a query-key pair), summed over layers of that window,
    None for full attention. `per_chunk`: linear attention, per started chunk of `chunk` tokens. With `whole_square`
    every pair is paid for, also those that the mask forbids, as by eager attention; fused kernels skip them.
    """

    per_token: float
    attention: tuple[tuple[int | None, float], ...] = ()
    per_chunk: float = 0.0
    chunk: int = GDN_CHUNK
    whole_square: bool = False

    def __call__(self, length: int) -> float:
        """Return the FLOPs of one sequence; ValueError when `length` is not a positive integer."""
        tokens = check_positive_int(length, "length")
        pairs = sum(flops * self.pairs(tokens, window) for window, flops in self.attention)
        return self.per_token * tokens + pairs + self.per_chunk * -(-tokens // self.chunk)

    def pairs(self, length: int, window: int | None = None) -> int:
        """Return the query-key pairs of a causal layer in which a token sees itself and `window - 1` before it."""
        if self.whole_square:
            return length * length
        seen = length if window is None else min(length, window)
        return seen * (seen + 1) // 2 + (length - seen) * seen

    @classmethod
    def from_config(cls, config: Any, lm_head: bool = True, whole_square: bool = False) -> "SequenceCost":
        """Read the text part of a Hugging Face config; vision towers are not counted.

        ValueError for a model type or layer type that is not known: give the numbers to SequenceCost yourself then.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        known = DENSE | MIXTURES
        if getattr(text, "model_type", None) not in known:
            raise ValueError(
                f"no cost model for model_type {getattr(text, 'model_type', None)!r}; known are {sorted(known)}. "
                "Build SequenceCost(per_token, attention) from your own numbers instead"
            )
        types = layer_types(text)
        per_token = sum(_feed_forward(text, layer) for layer in range(len(types)))
        per_token += 2.0 * text.hidden_size * text.vocab_size if lm_head else 0.0
        windows: dict[int | None, float] = {}
        per_chunk = 0.0
        for kind in types:
            if kind == "linear_attention":
                per_token += _delta_projections(text)
                per_chunk += _delta_chunk(text)
                continue
            window = text.sliding_window if kind == "sliding_attention" else None
            per_token += _attention_projections(text)
            windows[window] = windows.get(window, 0.0) + 4.0 * text.num_attention_heads * _head_dim(text)
        return cls(per_token, tuple(windows.items()), per_chunk, GDN_CHUNK, whole_square)


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
    return list(types)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _attention_projections(config: Any) -> float:
    """FLOPs a token of q, k, v and o."""
    query = config.num_attention_heads * (2 if config.model_type in GATED_QUERY else 1)
    heads = query + 2 * config.num_key_value_heads + config.num_attention_heads
    return 2.0 * config.hidden_size * heads * _head_dim(config)


def _feed_forward(config: Any, layer: int) -> float:
    """FLOPs a token of a layer's gated MLP, or of the router, the chosen experts and the shared one."""
    hidden = config.hidden_size
    sparse = config.model_type in MIXTURES and layer not in (getattr(config, "mlp_only_layers", None) or ())
    if not sparse or (layer + 1) % (getattr(config, "decoder_sparse_step", None) or 1):
        return 6.0 * hidden * config.intermediate_size
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    flops = 2.0 * hidden * experts + 6.0 * hidden * width * config.num_experts_per_tok
    return flops + (6.0 * hidden * shared + 2.0 * hidden if shared else 0.0)


def _delta_projections(config: Any) -> float:
    """FLOPs a token of a gated delta net's projections and its depthwise convolution."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    mixed = 2 * keys + values
    rows = mixed + values + 2 * config.linear_num_value_heads + values  # q, k, v; gate; beta and decay; output
    return 2.0 * config.hidden_size * rows + 2.0 * config.linear_conv_kernel_dim * mixed


def _delta_chunk(config: Any) -> float:
    """FLOPs a chunk of the gated delta rule in its chunked form (Yang et al. 2024, arXiv 2412.06464).

    Per value head: k k^T and q k^T, two triangular solves, three products with the state, and the values within the
    chunk.
    """
    c, k, v = GDN_CHUNK, config.linear_key_head_dim, config.linear_value_head_dim
    return float(config.linear_num_value_heads * (4 * c * c * k + c * c * (k + v) + 6 * c * k * v + 2 * c * c * v))

"""Make a Hugging Face causal LM right on packed sequences: an explicit, reversible change of one model instance.

Stock models leak state between packed sequences (the convolution and the recurrence of gated delta net layers, and
attention with a cache or a mask). After `adapt_for_packing(model)`, a call that carries a `PackedContext` runs these
layers through `seqpack.ops`, sequence by sequence. A call without one is untouched: padded batches, caches, generate().
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from engines.packing.context import PackedContext, PackedOps
from engines.packing.delta_net import packed_forward_of

if TYPE_CHECKING:
    from seqpack.batches.packed import PackedBatch

CONTEXT_KEY = "packed_context"
"""The keyword under which a context travels through the model's layers (recomputed layers see it as well)."""
_PREFIX = "packed_or_"
_ADAPTED: "WeakKeyDictionary[nn.Module, Adaptation]" = WeakKeyDictionary()


@dataclass
class Adaptation:
    """What `adapt_for_packing` changed; `undo()` puts everything back."""

    model: nn.Module
    changes: tuple[str, ...]
    delta_nets: dict[str, nn.Module]
    configs: list[tuple[nn.Module, Any]]
    layers: int

    def undo(self) -> None:
        """Restore the model as it was before; a second call does nothing."""
        if _ADAPTED.get(self.model) is not self:
            return
        for module in self.delta_nets.values():
            del module.__dict__["forward"]
        for module, config in self.configs:
            module.config = config
        del _ADAPTED[self.model]


def adapt_for_packing(model: Any) -> Adaptation:
    """Prepare this model instance for packed calls; the same Adaptation again if it is prepared already.

    ValueError for a model that cannot be: attention that is not chosen through transformers' AttentionInterface, or a
    layer that mixes tokens in a way not known here.
    """
    if model in _ADAPTED:
        return _ADAPTED[model]
    config = getattr(model, "config", None)
    if config is None:
        raise ValueError("adapt_for_packing needs a transformers model, this one has no config")
    delta_nets = {name: m for name, m in model.named_modules() if packed_forward_of(m) is not None}
    unknown = [name for name, m in model.named_modules() if _mixes_unknown(m)]
    if unknown:
        raise ValueError(f"no packed form is known of {unknown[0]} ({type(model.get_submodule(unknown[0])).__name__})")
    if any(
        isinstance(getattr(m, "forward", None), MethodType) and "forward" in m.__dict__ for m in delta_nets.values()
    ):
        raise ValueError("another adaptation already replaced a gated delta net's forward: undo that one first")
    changes = [f"{name}: forward" for name in delta_nets]
    configs = _own_configs(model)
    for name, module in delta_nets.items():
        module.forward = MethodType(_delta_net_forward(name, packed_forward_of(module), module.forward), module)
    changes.append(f"config: attention {config._attn_implementation} -> {model.config._attn_implementation}")
    text = config.get_text_config()
    adaptation = Adaptation(model, tuple(changes), delta_nets, configs, int(text.num_hidden_layers))
    _ADAPTED[model] = adaptation
    return adaptation


def packed_hidden(model: Any, input_ids: Tensor, position_ids: Tensor, context: PackedContext) -> Tensor:
    """Last hidden states [T, H] of packed tokens: `input_ids` i64[T], `position_ids` i64[T] or one row an axis [3|4,
    T].

    The model must be adapted. A layer that did not go through the context is an error, never a silent leak.
    """
    adaptation = _ADAPTED.get(model)
    if adaptation is None:
        raise ValueError("the model is not prepared for packed sequences: call adapt_for_packing(model) first")
    positions = position_ids.unsqueeze(-2)  # [1, T], or [axes, 1, T]
    if position_ids.ndim == 2:
        positions = position_ids.unsqueeze(1)
    output = model.base_model(
        input_ids=input_ids.unsqueeze(0),
        position_ids=positions,
        # A four-dimensional mask is handed through as it is, so that transformers builds none of T x T; packed layers
        # ignore it.
        attention_mask=input_ids.new_ones((1, 1, 1, 1), dtype=torch.bool),
        use_cache=False,
        **{CONTEXT_KEY: context},
    )
    if len(context.mixed) != adaptation.layers:
        raise RuntimeError(
            f"{len(context.mixed)} of {adaptation.layers} layers mixed tokens through the packed context: "
            "this model's layers do not hand keyword arguments down, so packing it would leak between sequences"
        )
    return output.last_hidden_state.squeeze(0)


def packed_logits(model: Any, packed: "PackedBatch", ops: PackedOps | None = None) -> Tensor:
    """All logits [T, V] of a packed batch: for tests and small models."""
    context = PackedContext(packed.cu_seqlens, packed.max_seqlen, ops=ops)
    positions = packed.values.get("position_ids", packed.position_ids)
    hidden = packed_hidden(model, packed.values["input_ids"], positions, context)
    return model.get_output_embeddings()(hidden)


def _delta_net_forward(name: str, packed: Any, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(module: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        context = kwargs.pop(CONTEXT_KEY, None)
        if context is None:
            return original(hidden_states, *args, **kwargs)
        context.mixed.append(name)
        return packed(module, hidden_states.squeeze(0), context).unsqueeze(0)

    return forward


def _attention_forward(original_name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """An attention function for transformers: packed where a context came along, the original otherwise."""

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        context: PackedContext | None = kwargs.pop(CONTEXT_KEY, None)
        if context is None:
            return _original_attention(module, original_name)(module, query, key, value, attention_mask, **kwargs)
        if kwargs.get("dropout"):
            raise ValueError("packed attention has no dropout: set attention_dropout to 0 in the model's config")
        context.mixed.append(f"attention {getattr(module, 'layer_idx', '?')}")
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        q, k, v = (x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value))
        return context.ops.attention(q, k, v, context, scale, kwargs.get("sliding_window")).unsqueeze(0), None

    return forward


def _original_attention(module: nn.Module, name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def _own_configs(model: Any) -> list[tuple[nn.Module, Any]]:
    """Give the model's modules configs of their own that name the packed attention; what they had before is
    returned."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    current = model.config.get_text_config()._attn_implementation
    if current not in ("eager", "sdpa"):
        raise ValueError(f"load the model with attn_implementation 'sdpa' or 'eager' to pack it, not {current!r}")
    name = _PREFIX + current
    AttentionInterface.register(name, _attention_forward(current))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[current])
    holders = [(m, m.config) for m in model.modules() if hasattr(m, "config") and "config" in m.__dict__]
    memo: dict[int, Any] = {}
    own = {id(config): copy.deepcopy(config, memo) for _, config in holders}
    for config in own.values():
        config._attn_implementation = name
    for module, config in holders:
        module.config = own[id(config)]
    return holders


_UNKNOWN_MIXERS = ("Mamba", "Mixer", "RWKV", "Conv1D", "ShortConv", "LinearAttention", "RGLRU", "GatedDeltaNet")


def _mixes_unknown(module: nn.Module) -> bool:
    name = type(module).__name__
    if packed_forward_of(module) is not None or isinstance(module, nn.Conv1d):
        return False
    return any(word in name for word in _UNKNOWN_MIXERS) and hasattr(module, "layer_idx")

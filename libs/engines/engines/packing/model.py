"""Make a Hugging Face causal LM right on packed sequences: an explicit, reversible change of one model instance.

Stock models leak state between packed sequences (the convolution and the recurrence of gated delta net layers, and
attention with a cache or a mask). After `adapt_for_packing(model)`, a call that carries a `PackedContext` runs these
layers through `seqpack.ops`, sequence by sequence. A call without one is untouched: padded batches, caches, generate().
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from engines.families.registry import family_of
from engines.packing.attention import packed_attention_forward
from engines.packing.context import PackedContext, PackedOps
from engines.packing.delta_net import PackedForward
from seqpack.batches.packed import PackedBatch

CONTEXT_KEY = "packed_context"
"""The keyword under which a context travels through the model's layers (recomputed layers see it as well)."""
_ADAPTED: "WeakKeyDictionary[nn.Module, Adaptation]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Adaptation:
    """What `adapt_for_packing` changed: `forward` of these modules, by name. `undo()` puts everything back."""

    model: nn.Module
    mixers: dict[str, nn.Module]

    @property
    def changes(self) -> tuple[str, ...]:
        """One line a change."""
        return tuple(f"{name}: forward" for name in self.mixers)

    def undo(self) -> None:
        """Restore the model as it was before; a second call does nothing."""
        if _ADAPTED.get(self.model) is not self:
            return
        for module in self.mixers.values():
            del module.__dict__["forward"]
        del _ADAPTED[self.model]


def adapt_for_packing(model: Any) -> Adaptation:
    """Prepare this model instance for packed calls; the same Adaptation again if it is prepared already.

    ValueError for a model whose family is not registered, or that is not what its family says.
    """
    if model in _ADAPTED:
        return _ADAPTED[model]
    config = getattr(model, "config", None)
    if config is None:
        raise ValueError("adapt_for_packing needs a transformers model, this one has no config")
    family = family_of(config)
    family.check_module(model)
    names = {module: name for name, module in model.named_modules()}
    mixers = [mixer for layer in family.layers(model) for mixer in family.mixers(layer)]
    found = [(names[module], module, packed) for module, packed in mixers]
    if any("forward" in vars(module) for _, module, _ in found):
        raise ValueError("another adaptation already replaced a layer's forward: undo that one first")
    for name, module, packed in found:
        own = packed_attention_forward(module) if packed is None else _delta_net(packed)
        module.forward = MethodType(_with_context(name, own, module.forward), module)
    adaptation = Adaptation(model, {name: module for name, module, _ in found})
    _ADAPTED[model] = adaptation
    return adaptation


def packed_output(model: Any, input_ids: Tensor, position_ids: Tensor, context: PackedContext, **options: Any) -> Any:
    """The base model's output for packed tokens, as one row: `input_ids` i64[T], `position_ids` i64[T] or [3|4, T].

    `options` go to the base model (such as output_router_logits). The model must be adapted. A layer that did not go
    through the context is an error, never a silent leak.
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
        **options,
        **{CONTEXT_KEY: context},
    )
    if len(context.mixed) != len(adaptation.mixers):
        raise RuntimeError(
            f"{len(context.mixed)} of {len(adaptation.mixers)} layers mixed tokens through the packed context: "
            "this model's layers do not hand keyword arguments down, so packing it would leak between sequences"
        )
    return output


def packed_hidden(model: Any, input_ids: Tensor, position_ids: Tensor, context: PackedContext) -> Tensor:
    """Last hidden states [T, H] of packed tokens; arguments as for `packed_output`."""
    return packed_output(model, input_ids, position_ids, context).last_hidden_state.squeeze(0)


def packed_logits(model: Any, packed: PackedBatch, ops: PackedOps | None = None) -> Tensor:
    """All logits [T, V] of a packed batch: for tests and small models."""
    context = PackedContext(packed.cu_seqlens, packed.max_seqlen, ops=ops)
    positions = packed.values.get("position_ids", packed.position_ids)
    hidden = packed_hidden(model, packed.values["input_ids"], positions, context)
    return family_of(model.config).head(model)(hidden)


def _with_context(name: str, packed: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        context: PackedContext | None = kwargs.pop(CONTEXT_KEY, None)
        if context is None:
            return original(*args, **kwargs)
        context.mixed.append(name)
        return packed(module, context, *args, **kwargs)

    return forward


def _delta_net(packed: PackedForward) -> Callable[..., Any]:
    def forward(module: nn.Module, context: PackedContext, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        del args, kwargs  # masks and caches of the stock layer
        return packed(module, hidden_states.squeeze(0), context).unsqueeze(0)

    return forward

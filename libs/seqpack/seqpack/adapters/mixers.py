"""Packed forward passes in the layers of one model instance: an explicit, reversible change.

Stock models leak state between packed sequences (the convolution and the recurrence of gated delta net layers, and
attention with a cache or a mask). After `adapt_mixers(model, mixers)`, a call that carries a `PackedContext` runs these
layers through `seqpack.ops`, sequence by sequence. A call without one is untouched: padded batches, caches, generate().
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from seqpack.adapters.attention import packed_attention_forward
from seqpack.adapters.context import PackedContext
from seqpack.adapters.delta_net import PackedForward

CONTEXT_KEY = "packed_context"
"""The keyword under which a context travels through the model's layers (recomputed layers see it as well)."""
_ADAPTED: "WeakKeyDictionary[nn.Module, Adaptation]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Adaptation:
    """What was changed in a model: `forward` of these modules, by name. `undo()` puts everything back.

    `hooks`: what translates the arguments of a trainer (`seqpack.adapters.huggingface`), where that was asked for.
    """

    model: nn.Module
    mixers: dict[str, nn.Module]
    hooks: list[RemovableHandle] = field(default_factory=list)

    @property
    def changes(self) -> tuple[str, ...]:
        """The changes, one line each."""
        return tuple(f"{name}: forward" for name in self.mixers)

    def undo(self) -> None:
        """Restore the model as it was before; a second call does nothing."""
        if _ADAPTED.get(self.model) is not self:
            return
        for hook in self.hooks:
            hook.remove()
        for module in self.mixers.values():
            del module.__dict__["forward"]
        del _ADAPTED[self.model]


def adapt_mixers(model: nn.Module, mixers: Iterable[tuple[nn.Module, PackedForward | None]]) -> Adaptation:
    """Replace the forward of each mixer (a module that mixes tokens) by its packed form (None: attention).

    Return the same Adaptation if the model is adapted already. ValueError where another adaptation replaced a layer's
    forward, or an attention layer does not look its attention function up in transformers' table.
    """
    if model in _ADAPTED:
        return _ADAPTED[model]
    names = {module: name for name, module in model.named_modules()}
    named = [(names[module], module, packed) for module, packed in mixers]
    if any("forward" in vars(module) for _, module, _ in named):
        raise ValueError("another adaptation already replaced a layer's forward: undo that one first")
    forwards = [packed_attention_forward(m) if packed is None else _delta_net(packed) for _, m, packed in named]
    for (name, module, _), own in zip(named, forwards, strict=True):
        module.forward = MethodType(_with_context(name, own, module.forward), module)
    adaptation = _ADAPTED[model] = Adaptation(model, {name: module for name, module, _ in named})
    return adaptation


def check_mixed(context: PackedContext, adaptation: Adaptation) -> None:
    """Raise RuntimeError unless every mixer used the context: a layer that did not would leak."""
    if len(context.mixed) != len(adaptation.mixers):
        raise RuntimeError(
            f"{len(context.mixed)} of {len(adaptation.mixers)} layers mixed tokens through the packed context: "
            "this model's layers do not hand keyword arguments down, so packing it would leak between sequences"
        )


def no_mask(like: Tensor) -> Tensor:
    """Return a mask that transformers passes on instead of building one of T x T; packed layers ignore it."""
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=like.device)


def packed_output(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    context: PackedContext,
    decoder: Any = None,
    embeddings: Tensor | None = None,
    **options: Any,
) -> Any:
    """Return the base model's output for packed tokens, as one row: `input_ids` i64[T], `position_ids` i64[T] or [3|4,
    T].

    `decoder`: the text model inside of one that sees images too. `embeddings` [T, H] stand in the place of those of
    `input_ids`, as where images are among the tokens. `options` go to the base model (such as output_router_logits).
    The model must be adapted. A layer that did not go through the context is an error, never a silent leak.
    """
    adaptation = _ADAPTED.get(model)
    if adaptation is None:
        raise ValueError("the model is not prepared for packed sequences: call adapt_for_packing(model) first")
    positions = position_ids.unsqueeze(-2)  # [1, T], or [axes, 1, T]
    context.mixed.clear()
    inputs = {"input_ids": input_ids} if embeddings is None else {"inputs_embeds": embeddings}
    output = (model.base_model if decoder is None else decoder)(
        **{name: tensor.unsqueeze(0) for name, tensor in inputs.items()},
        position_ids=positions,
        attention_mask=no_mask(input_ids),
        use_cache=False,
        **options,
        **{CONTEXT_KEY: context},
    )
    check_mixed(context, adaptation)
    return output


def packed_hidden(model: Any, input_ids: Tensor, position_ids: Tensor, context: PackedContext) -> Tensor:
    """Return last hidden states [T, H] of packed tokens; arguments as for `packed_output`."""
    hidden: Tensor = packed_output(model, input_ids, position_ids, context).last_hidden_state
    return hidden.squeeze(0)


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

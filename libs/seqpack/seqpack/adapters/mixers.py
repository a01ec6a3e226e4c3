"""Packed mixers in the layers of one model instance: an explicit, reversible change.

Stock models leak state between packed sequences (the convolution and the recurrence of gated delta net layers, and
attention with a cache or a mask). After `adapt_mixers(model, mixers)`, a call that carries a `PackedContext` or flash
arguments runs these layers through `seqpack.ops`, sequence by sequence. A call without them is untouched: padded
batches, caches, generate(); but position_ids that begin again in a row, with nothing that says where, are refused.

No forward is replaced: attention layers look a function up under our own name, delta nets and the decoder have a
subclass of their class. So the model is copied, pickled and compiled as a stock one is, and a copy is adapted too.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seqpack.adapters.attention import adapt_attention, restore_attention
from seqpack.adapters.boundaries import context_of, no_mask, refuse_restarts, wrapping_mask
from seqpack.adapters.context import CONTEXT_KEY, ContextMask, PackedContext, carried
from seqpack.adapters.delta_net import PackedForward
from seqpack.adapters.rotary import PackedRotary, by_length
from seqpack.adapters.stock_rows import given_arguments, takes_arguments
from seqpack.adapters.subclasses import remove_mixin, set_mixin

_NUMBER, _BY_MASK = "packed_mixers", "packed_by_mask"


@dataclass(frozen=True)
class Adaptation:
    """What was changed in a model: its decoder, and these mixers, by name. `undo()` puts everything back."""

    model: nn.Module
    decoder: nn.Module
    mixers: Mapping[str, nn.Module]
    by_mask: bool = False

    @property
    def changes(self) -> tuple[str, ...]:
        """The changes, one line each."""
        kinds = {name: "class" if isinstance(m, PackedDeltaNet) else "config" for name, m in self.mixers.items()}
        kinds |= {name: "class" for name, m in self.model.named_modules() if isinstance(m, PackedRotary)}
        return tuple(f"{name}: {kind}" for name, kind in kinds.items())

    def undo(self) -> None:
        """Restore the model as it was before; a second call does nothing."""
        if not isinstance(self.decoder, PackedDecoder):
            return
        for module in self.mixers.values():
            remove_mixin(module, PackedDeltaNet)
            restore_attention(module)
        for module in by_length(self.decoder):
            remove_mixin(module, PackedRotary)
        remove_mixin(self.decoder, PackedDecoder)
        del vars(self.decoder)[_NUMBER], vars(self.decoder)[_BY_MASK]

    @contextmanager
    def without(self) -> Iterator[None]:
        """Give the model its stock layers inside the block, and adapt it again behind it."""
        adapted = [(m, type(m).packed if isinstance(m, PackedDeltaNet) else None) for m in self.mixers.values()]
        self.undo()
        try:
            yield
        finally:
            adapt_mixers(self.model, adapted, self.decoder, self.by_mask)


def adapt_mixers(
    model: Any,
    mixers: Iterable[tuple[nn.Module, PackedForward | None]],
    decoder: nn.Module | None = None,
    by_mask: bool = False,
) -> Adaptation:
    """Make each mixer (a module that mixes tokens) run its packed form (None: attention) where a call has a context.

    `decoder`: the text model that holds them, `model.base_model` by default. `by_mask`: the context
    also travels in the mask, as to layers that hand no other keyword down. An adapted model stays as it is.
    ValueError where another adaptation replaced a layer's forward, or an attention layer does not look its function up
    in transformers' registry.
    """
    decoder = model.base_model if decoder is None else decoder
    assert decoder is not None
    names = {module: name for name, module in model.named_modules()}
    pairs = list(mixers)
    adaptation = Adaptation(model, decoder, {names[module]: module for module, _ in pairs}, by_mask)
    if isinstance(decoder, PackedDecoder):
        return adaptation
    if any("forward" in vars(module) for module, _ in pairs):
        raise ValueError("another adaptation already replaced a layer's forward: undo that one first")
    adapt_attention(module for module, packed in pairs if packed is None)
    for module, packed in pairs:
        if packed is not None:
            set_mixin(module, PackedDeltaNet, packed=packed)
    for module in by_length(decoder):
        set_mixin(module, PackedRotary)
    set_mixin(decoder, PackedDecoder)
    vars(decoder)[_NUMBER] = len(pairs)
    vars(decoder)[_BY_MASK] = by_mask
    return adaptation


class PackedDecoder(nn.Module):
    """The class of an adapted decoder, before its stock class: where each call learns where its sequences begin."""

    packed_mixers: int
    packed_by_mask: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stock forward; with boundaries, check that every mixer used them: one that did not would leak."""
        context: PackedContext | None = kwargs.get(CONTEXT_KEY)
        if context is None:
            context, kwargs = context_of(args, kwargs)
        if context is None:
            refuse_restarts(args, kwargs)
            return super().forward(*args, **kwargs)
        context.mixed.clear()
        if self.packed_by_mask:
            kwargs = {**kwargs, "attention_mask": wrapping_mask(self, context)}
        output = super().forward(*args, **kwargs)
        if not context.mixed or len(context.mixed) % self.packed_mixers:  # some layers mix several times a pass
            raise RuntimeError(
                f"{len(context.mixed)} of {self.packed_mixers} layers mixed tokens through the packed context: "
                "this model's layers do not hand keyword arguments down, so packing it would leak between sequences"
            )
        return output

    def build_alibi_tensor(self, attention_mask: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the bias of ALiBi (Bloom): to packed layers that of two positions, which tells them the slopes."""
        mask = attention_mask.new_ones(1, 2) if isinstance(attention_mask, ContextMask) else attention_mask
        bias: Tensor = super().build_alibi_tensor(mask, *args, **kwargs)  # type: ignore[misc]
        return bias


class PackedDeltaNet(nn.Module):
    """The class of an adapted layer that mixes tokens by code of its own, before its stock class."""

    packed: PackedForward

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the packed form where the call has a context (masks and caches are the stock layer's), else the stock."""
        context: PackedContext | None = kwargs.pop(CONTEXT_KEY, None) or carried(*args, *kwargs.values())
        if context is None:
            return super().forward(hidden_states, *args, **kwargs)
        return self._mix(context, hidden_states, *args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _mix(self, context: PackedContext, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the packed form, uncompiled: it loops over sequences, or is a kernel."""
        context.mixed.append(type(self).__name__)
        packed: Any = self.packed
        if takes_arguments(packed):
            return packed(self, hidden_states, context, given_arguments(self, hidden_states, *args, **kwargs))
        return packed(self, hidden_states.squeeze(0), context).unsqueeze(0)


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
    decoder = model.base_model if decoder is None else decoder
    if not isinstance(decoder, PackedDecoder):
        raise ValueError("the model is not prepared for packed sequences: call adapt_for_packing(model) first")
    inputs = {"input_ids": input_ids} if embeddings is None else {"inputs_embeds": embeddings}
    return decoder(
        **{name: tensor.unsqueeze(0) for name, tensor in inputs.items()},
        position_ids=position_ids.unsqueeze(-2),  # [1, T], or [axes, 1, T]
        attention_mask=no_mask(input_ids),
        use_cache=False,
        **options,
        **{CONTEXT_KEY: context},
    )


def packed_hidden(model: Any, input_ids: Tensor, position_ids: Tensor, context: PackedContext) -> Tensor:
    """Return last hidden states [T, H] of packed tokens; arguments as for `packed_output`."""
    hidden: Tensor = packed_output(model, input_ids, position_ids, context).last_hidden_state
    return hidden.squeeze(0)

"""Stock decoder layers compiled as they are, on packed calls: norms, projections, gates, biases, MLPs of any kind.

torch.compile traces the layer's own forward. Attention inside of whole sequences is one node of the graph
(`engines.fast.attention`). What else mixes tokens (delta nets, attention whose ranks share sequences, sinks, soft caps)
runs uncompiled between two graphs. Layers of one class share their graphs, and one graph is for all numbers of tokens.

The plain reference is the same model without it; `engines.prove.traced` compares the two before a type is admitted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engines.families.registry import family_of
from engines.fast.attention import causal_attention
from engines.fast.compiling import MIN_TOKENS, compiled
from engines.private_api import maybe_mark_dynamic
from seqpack.adapters.attention import IGNORED_KEYS, packed_attention
from seqpack.adapters.context import CONTEXT_KEY, ContextMask, LocalOps, PackedContext
from seqpack.adapters.subclasses import remove_mixin, set_mixin

_BY_NUMBER = ("attention_chunk_size", "attn_temperature_tuning")
"""What makes attention depend on the number of its layer, which a graph would be made for: it runs uncompiled."""


@dataclass(frozen=True)
class TracedLayers:
    """The change of `use_traced_layers`: the classes of these layers. `undo()` restores them."""

    layers: tuple[nn.Module, ...]

    def undo(self) -> None:
        """Restore the layers; a second call does nothing."""
        for layer in self.layers:
            remove_mixin(layer, TracedLayer)
            vars(layer).pop("traced_by", None)


def use_traced_layers(model: Any, backend: str = "inductor") -> TracedLayers:
    """Compile the decoder layers of a model that is adapted for packing, on packed calls; `backend` is torch's."""
    layers = tuple(family_of(model.config).layers(model))
    for layer in layers:
        set_mixin(layer, TracedLayer)
        vars(layer)["traced_by"] = backend
    return TracedLayers(layers)


class TracedAttention:
    """Attention of a layer that a compiler traces, as `PackedContext.attend`: a node of the graph where it can be."""

    def __init__(self, context: PackedContext) -> None:
        self.cu_seqlens = context.cu_seqlens
        self.longest = torch.tensor(context.max_seqlen)
        self.is_whole = isinstance(context.ops, LocalOps) and context.ops.backend == "auto"
        self.used = False
        maybe_mark_dynamic(self.cu_seqlens, 0)

    @staticmethod
    def of(context: PackedContext) -> "TracedAttention":
        """Return that of a context, made at the first call."""
        if "traced" not in context.derived:
            context.derived["traced"] = TracedAttention(context)
        traced: TracedAttention = context.derived["traced"]
        return traced

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: PackedContext,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Compute `packed_attention`."""
        dropout = options.pop("dropout", 0.0)
        plain = not dropout and all(value is None or name in IGNORED_KEYS for name, value in options.items())
        usual = not any(getattr(owner, name, None) for owner in (module, module.config) for name in _BY_NUMBER)
        fits = value.shape[-1] == query.shape[-1] and _has_kernel(value)
        if not (plain and usual and fits and self.is_whole):
            given = {"scaling": scaling, "sliding_window": sliding_window, "dropout": dropout, **options}
            untraced: Tensor = _untraced(module, query, key, value, context, **given)
            return untraced
        self.used = True
        q, k, v = (x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value))
        o: Tensor = causal_attention(q, k, v, self.cu_seqlens, self.longest, scaling, sliding_window)[0]
        return o.unsqueeze(0)


class TracedLayer(nn.Module):
    """The class of a decoder layer that is compiled, before its stock class."""

    traced_by: str

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled layer on a packed call of several tokens, the stock forward on any other."""
        context: PackedContext | None = kwargs.get(CONTEXT_KEY)
        tokens = hidden_states.shape[1]
        if context is None or tokens < MIN_TOKENS:
            return super().forward(hidden_states, *args, **kwargs)
        for tensor in _tensors((hidden_states, *args, *kwargs.values())):
            _mark(tensor, tokens)
        kwargs = {name: None if isinstance(value, ContextMask) else value for name, value in kwargs.items()}
        attention = context.attend = TracedAttention.of(context)
        attention.used = False
        try:
            forward = super().forward.__func__  # type: ignore[attr-defined]
            output = compiled(forward, self.traced_by, whole=False)(self, hidden_states, *args, **kwargs)
        finally:
            context.attend = None
        if attention.used:
            context.mixed.append(type(self).__name__)
        return output


_untraced = torch.compiler.disable(packed_attention)


def _has_kernel(value: Tensor) -> bool:
    """Return whether flash attention takes these values; on a CPU all are taken."""
    return not value.is_cuda or (value.dtype in (torch.bfloat16, torch.float16) and value.shape[-1] <= 256)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _mark(tensor: Tensor, tokens: int) -> None:
    """Mark the dimension of tokens as one whose size changes: [.., T, features], or integers [.., T]."""
    place = -1 if tensor.dtype in (torch.int32, torch.int64) else -2
    if tensor.ndim >= 2 and tensor.shape[place] == tokens:
        maybe_mark_dynamic(tensor, tensor.ndim + place)

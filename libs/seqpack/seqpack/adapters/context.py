"""What travels with packed tokens through a model: where sequences begin, and who computes the operations that mix
tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from seqpack.ops import attention, by_rows, causal_conv1d, gated_delta_rule

Activation = Literal["silu"] | None
CONTEXT_KEY = "packed_context"
"""The keyword under which a context travels through the model's layers (recomputed layers see it as well)."""


class PackedOps(Protocol):
    """The operations that mix tokens; all others are token by token. Shapes as in seqpack.ops."""

    def causal_conv1d(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, context: "PackedContext", activation: Activation
    ) -> Tensor:
        """Return the depthwise convolution: x [T, D], weight [D, K] -> [T, D]."""
        ...

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, context: "PackedContext"
    ) -> Tensor:
        """Return the recurrence: q, k [T, Hk, Dk], v [T, Hv, Dv], g and beta [T, Hv] -> [T, Hv, Dv]."""
        ...

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: "PackedContext",
        scale: float,
        window: int | None,
        **options: Any,
    ) -> Tensor:
        """Return causal attention: q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, Hq, Dv].

        `options`: `soft_cap`, `sinks`, `chunk` and `alibi` of `seqpack.ops.attention`, where a layer has them.
        """
        ...

    def by_rows(self, function: Callable[[Tensor], Tensor], x: Tensor, context: "PackedContext") -> Tensor:
        """Apply a causal function of rows [n, L, D] -> [n, L, D'] to each sequence: x [T, D] -> [T, D']."""
        ...


@dataclass(frozen=True)
class LocalOps:
    """Whole sequences on this rank: seqpack.ops as they are. `backend` is handed to every operation."""

    backend: str = "auto"

    def causal_conv1d(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, context: "PackedContext", activation: Activation
    ) -> Tensor:
        """Return the depthwise convolution of a gated delta net layer."""
        return causal_conv1d(x, weight, bias, context.cu_seqlens, activation=activation, backend=self.backend)

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, context: "PackedContext"
    ) -> Tensor:
        """Return the recurrence, with q and k normalised to length one."""
        return gated_delta_rule(q, k, v, g, beta, context.cu_seqlens, l2norm_qk=True, backend=self.backend)[0]

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: "PackedContext",
        scale: float,
        window: int | None,
        **options: Any,
    ) -> Tensor:
        """Return causal attention within each sequence."""
        options |= {"max_seqlen": context.max_seqlen, "backend": self.backend}
        return attention(q, k, v, context.cu_seqlens, scale=scale, window=window, **options)

    def by_rows(self, function: Callable[[Tensor], Tensor], x: Tensor, context: "PackedContext") -> Tensor:
        """Apply a causal function of rows to each sequence."""
        return by_rows(function, x, context.cu_seqlens, self.backend)


class PackedContext:
    """Where sequences begin in the packed tokens of one call, and who mixes them.

    `cu_seqlens` i32[n+1] of this rank's tokens. `ops` computes convolution, recurrence and attention; a
    context-parallel implementation keeps its group and layout in `cp_group`, `layout` and `plan` and leaves the model
    code as it is. `mixed` names the layers that mixed tokens through this context, in order: what proves that none was
    missed. `edges`: the same boundaries on the host, and `positions` [T] in the sequences, where the caller has
    them; `derived`: what is computed from them once a call, by name. `attend` stands in for
    `seqpack.adapters.attention.packed_attention` in a layer that a compiler traces.

    Deliberately no dataclass: FSDP's hooks rebuild those (and lists) on their way into a layer.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,
        max_seqlen: int,
        ops: PackedOps | None = None,
        cp_group: Any = None,
        layout: str = "contiguous",
        plan: Any = None,
        edges: tuple[int, ...] | None = None,
        positions: Tensor | None = None,
    ) -> None:
        self.cu_seqlens = cu_seqlens
        self.max_seqlen = max_seqlen
        self.ops: PackedOps = ops or LocalOps()
        self.cp_group = cp_group
        self.layout = layout
        self.plan = plan
        self.mixed: list[str] = []
        self.edges = edges
        self.positions = positions
        self.derived: dict[str, Any] = {}
        self.attend: Callable[..., Tensor] | None = None


class ContextMask(Tensor):
    """A mask that carries a context to layers whose code hands no other keyword down, recomputed ones too; what an
    operation makes of it carries the same."""

    context: PackedContext

    @classmethod
    def of(cls, context: PackedContext) -> "ContextMask":
        """Return a mask with a context, the only thing that packed layers read; decoders drop masks of ones."""
        mask = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=context.cu_seqlens.device)
        carrier = mask.as_subclass(cls)
        carrier.context = context
        return carrier

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation as torch does."""
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(result, ContextMask) and (context := carried(*args, *(kwargs or {}).values())) is not None:
            result.context = context
        return result


def carried(*values: Any) -> PackedContext | None:
    """Return the context of the first mask among some values that carries one; None without."""
    return next((one.context for one in values if isinstance(one, ContextMask) and "context" in vars(one)), None)


def positions_of(values: Mapping[str, Tensor], default: Tensor) -> Tensor:
    """Return the positions for rotary embeddings: the batch's own (a row an axis) if present, else `default`."""
    own = values.get("position_ids")
    return default if own is None else own.to(torch.int64)

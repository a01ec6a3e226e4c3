"""The MLP of a decoder layer with experts, on packed calls: norm, router, the shared expert and the routed ones.

Router and experts are called as modules: hooks on them (replay, recording, FSDP's of experts that ranks share) see what
they see of a stock model. Beside the stock forward, which every other call gets, an adapted router has logits in
float32, and adapted experts grouped products between compiled functions (`engines.experts.grouped_experts`).
"""

from typing import Any

import torch
from torch import Tensor, nn

from engines.experts.float32_logits import float32_logits
from engines.experts.grouped_experts import Run, routed_experts
from engines.fast.compiling import MIN_TOKENS, compiled, mark_tokens
from seqpack.adapters.subclasses import remove_mixin, set_mixin


def is_routed(layer: Any) -> bool:
    """Return whether a decoder layer has experts."""
    return hasattr(layer.mlp, "experts")


def use_routed_functions(layer: Any) -> None:
    """Give the router and the experts of a decoder layer the classes that can compute by functions."""
    set_mixin(layer.mlp.gate, Float32Router)
    set_mixin(layer.mlp.experts, FunctionExperts)


def undo_routed_functions(layer: Any) -> None:
    """Restore the stock classes; nothing where they are."""
    if is_routed(layer):
        remove_mixin(layer.mlp.gate, Float32Router)
        remove_mixin(layer.mlp.experts, FunctionExperts)


def routed_sum(layer: Any, n: Tensor, backend: str | None) -> Tensor:
    """Return the sum of the routed experts of normed tokens n [T, H]."""
    _, top_scores, experts = layer.mlp.gate(n, by_functions=True)
    result: Tensor = layer.mlp.experts(n, experts, top_scores, run=FunctionCalls(backend))
    return result


class FunctionCalls:
    """Calls of the functions of experts, compiled where there are tokens for it."""

    def __init__(self, backend: str | None) -> None:
        self.backend = backend

    def __call__(self, function: Run, *arguments: Any) -> Any:
        """Call `function`, whose arguments up to the pairs have tokens in dimension 0."""
        if self.backend is None or len(arguments[0]) < MIN_TOKENS:
            return function(*arguments)
        place = next(number for number, one in enumerate(arguments) if isinstance(one, tuple))
        mark_tokens((*arguments[:place], *arguments[place]))
        return compiled(function, self.backend)(*arguments)


class Float32Router(nn.Module):
    """The class of a router that can have logits in float32, before its stock class."""

    weight: Tensor
    top_k: int

    def forward(self, hidden_states: Tensor, by_functions: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return (logits [T, E], weights [T, k], experts i64[T, k]); those of `by_functions` are float32."""
        if not by_functions:
            stock: tuple[Tensor, Tensor, Tensor] = super().forward(hidden_states)
            return stock
        logits = float32_logits(hidden_states, self.weight)
        weights, experts = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if getattr(self, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), experts


class FunctionExperts(nn.Module):
    """The class of experts that can compute by functions, before their stock class."""

    gate_up_proj: Tensor
    down_proj: Tensor

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, run: Run | None = None
    ) -> Tensor:
        """Return the sum of each token's experts [T, H]; without `run` by the stock forward."""
        if run is None:
            stock: Tensor = super().forward(hidden_states, top_k_index, top_k_weights)
            return stock
        return routed_experts(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj, run)

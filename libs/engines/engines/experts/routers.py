"""The routers of one transformers model, with hooks that set and record which experts tokens go to.

A sampler and a trainer compute the same router in different kernels, and near a tie they choose different experts: the
ratio of a policy update then compares two functions. Routing replay ("Stabilizing MoE reinforcement learning by
aligning training and inference routers", arXiv 2510.11370) trains every token through the experts that it was sampled
through; the weights that they are mixed with are still the trainer's own, so that the router gets its gradient.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engines.families.registry import family_of


class Taken(NamedTuple):
    """The choices of one call of a model: `experts` i64[T, k] a routed layer, `counted` bool[T] the real tokens."""

    experts: tuple[Tensor, ...]
    counted: Tensor

    def load(self, experts: int) -> Tensor:
        """Return f32[layers, E], how many tokens went to each expert; nothing waits for the device."""
        counts = self.counted.new_zeros((len(self.experts), experts), dtype=torch.float32)
        for row, chosen in zip(counts, self.experts, strict=True):
            row.index_add_(0, chosen.flatten(), self.counted.float().repeat_interleave(chosen.shape[-1]))
        return counts


class Routers:
    """Hooks on the routers of a model; `remove()` takes them off again.

    `begin` comes before a call of the model, `end` after it. What `begin` was given holds until the next one, so that
    layers that are recomputed in the backward pass take the same experts.
    """

    def __init__(self, model: Any) -> None:
        """Install the hooks. ValueError for a model without a router."""
        routers = _routers(model)
        self.layers, self.top_k, self.experts = routed_sizes(model)
        self._given: Tensor | None = None
        self._taken: list[Tensor] | None = None
        self._handles = [m.register_forward_hook(partial(self._route, layer)) for layer, m in enumerate(routers)]

    @staticmethod
    def of(model: Any) -> "Routers | None":
        """Return hooks on a model's routers; None where it has none."""
        return Routers(model) if _routers(model) else None

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def begin(self, experts: Tensor | None) -> None:
        """Set the `experts` i16[T, layers, k] of the next call, -1 where the router chooses; None: it always does."""
        if experts is not None and experts.shape[1:] != (self.layers, self.top_k):
            raise ValueError(
                f"the model has {self.layers} routed layers and {self.top_k} experts a token, the experts given are "
                f"{tuple(experts.shape)}"
            )
        self._given, self._taken = experts, []

    def end(self, counted: Tensor) -> Taken:
        """Return what the call chose; `counted` bool[T] leaves padding out."""
        taken, self._taken = self._taken, None
        assert taken is not None
        assert len(taken) == self.layers
        return Taken(tuple(taken), counted.reshape(-1))

    def _route(self, layer: int, router: nn.Module, _args: Any, output: Any) -> Any:
        """Replace chosen experts by those that were set: (logits [T, E], weights [T, k], experts i64[T, k])."""
        logits, _, experts = output
        if self._given is not None:
            replayed = self._given[:, layer].to(torch.int64)
            experts = torch.where(replayed >= 0, replayed, experts)
            weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, experts)
            if getattr(router, "norm_topk_prob", True):
                weights = weights / weights.sum(-1, keepdim=True)
            output = (logits, weights.to(logits.dtype), experts)
        if self._taken is not None:
            self._taken.append(experts)
        return output


def routed_sizes(model: Any) -> tuple[int, int, int]:
    """Return (routed layers, experts a token goes to, experts) of a model with routers; `open_model` refuses others."""
    text, layers = model.config.get_text_config(), len(_routers(model))
    assert layers, f"{text.model_type} has no router"
    return layers, int(text.num_experts_per_tok), int(text.num_experts)


def _routers(model: Any) -> list[nn.Module]:
    """Return the routers of all layers, in order."""
    family = family_of(model.config)
    return [m for layer in family.layers(model) for m in layer.modules() if type(m).__name__ == family.router]

"""Recording of experts in vLLM's worker: its routers report what they choose, step by step.

vLLM's own way (enable_return_routed_experts) needs its second model runner, which has no CPU, and its prefix cache,
which leaves the cached tokens' experts out. Both use the same hook of its routers.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from rollout.experts import UNKNOWN, RoutedExperts


class Rows(NamedTuple):
    """Experts of one request in one step: its name, the place of the first token read, i16[tokens, layers, k]."""

    name: str
    first: int
    experts: Tensor


class NotedExperts:
    """Extension of vLLM's worker by its `worker_extension_cls`."""

    model_runner: Any
    noted_experts: list[Tensor]

    def note_experts(self) -> None:
        """Start recording. Raise ValueError where the model has no experts, or routers that can't report."""
        layers = [module for module in self.model_runner.model.modules() if isinstance(module, MoERunner)]
        for layer in layers:
            if layer.is_monolithic or not isinstance(layer.router, BaseRouter):
                raise ValueError(f"vLLM's {type(layer.router).__name__} does not tell its choice: routed_experts off")
        if not layers:
            raise ValueError("the model has no experts: leave routed_experts off")
        self.noted_experts = []
        for layer in layers:
            layer.router.set_capture_fn(self.noted_experts.append)

    def take_experts(self) -> list[Rows]:
        """Return the experts of the last step's tokens, request by request; [] where it read none."""
        layers, self.noted_experts[:] = list(self.noted_experts), []
        if not layers:
            return []
        batch = self.model_runner.input_batch
        names = list(batch.req_ids)
        bounds = self.model_runner.query_start_loc.np[: len(names) + 1].tolist()
        chosen = torch.stack([layer[: bounds[-1]] for layer in layers], dim=1).to("cpu", torch.int16)
        firsts = batch.num_computed_tokens_cpu[: len(names)].tolist()
        parts = [chosen[begin:end].clone() for begin, end in pairwise(bounds)]
        return [Rows(name, first, part) for name, first, part in zip(names, firsts, parts, strict=True)]


class RequestExperts:
    """The experts of running requests, joined from their steps."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}
        self._lengths: dict[str, int] = {}

    def note(self, rows: list[Rows]) -> None:
        """Add the experts of a step. A token that is read again, perhaps by later weights, keeps its first experts;
        those of a cached prompt, which no step read, are unknown."""
        for name, first, experts in rows:
            parts, have = self._parts.setdefault(name, []), self._lengths.get(name, 0)
            if first > have:
                parts.append(experts.new_full((first - have, *experts.shape[1:]), UNKNOWN))
            parts.append(experts[max(0, have - first) :])
            self._lengths[name] = max(have, first + len(experts))

    def take(self, name: str) -> RoutedExperts | None:
        """Return the known experts of a request that ends."""
        self._lengths.pop(name, None)
        parts = self._parts.pop(name, None)
        return None if parts is None else RoutedExperts.of(torch.cat(parts))

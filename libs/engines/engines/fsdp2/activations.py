"""Gradient checkpointing, and the inputs of recomputed layers in host memory between forward and backward pass.

For one layer with its inputs moved:

1. Its hidden states are copied to host memory (pinned where the device is a GPU).
2. The forward pass computes from the tensor that is there; checkpointing is not given it, so that it is freed.
3. The backward pass computes the layer again from the copy, brought back. Gradients flow through the graph of the first
   forward pass, so that they never leave the device.

No bit of a step changes. What stays on the device is one layer's activations; the host holds tokens x hidden size x
layers of a micro-batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engines.families.registry import family_of
from engines.private_api import wrap_checkpointing

Checkpoint = Callable[..., Any]


def recompute_layers(model: Any, offload: bool = False) -> None:
    """Turn gradient checkpointing on, by this transformers release's name for it; see the module's text."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for layer in family_of(model.config).layers(model):
        layer.training = True  # the layer alone: what is inside of it stays in evaluation mode
        if offload:
            wrap_checkpointing(layer, moved_inputs)


def moved_inputs(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint(function, hidden_states, *args)` that keeps its hidden states in host memory."""

    def call(function: Callable[..., Any], hidden_states: Tensor, *args: Any) -> Any:
        host = _on_host(hidden_states)
        device, differentiable = hidden_states.device, hidden_states.requires_grad
        first = [hidden_states]

        def compute(_: Tensor, *rest: Any) -> Any:
            if first:
                return function(first.pop(), *rest)
            again = host.to(device, non_blocking=True, copy=True).requires_grad_(differentiable)
            return function(again, *rest)

        like: Tensor = hidden_states.new_empty(0)  # tells checkpointing which device it is on
        del hidden_states
        return checkpoint(compute, like, *args)

    return call


def _on_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor.detach(), non_blocking=True)

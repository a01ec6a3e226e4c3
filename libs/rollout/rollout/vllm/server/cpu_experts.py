"""Experts on a CPU: kernels after a weight sync, and on workers that have only some of the experts."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


def pack_experts(model: nn.Module) -> None:
    """Pack the experts into the order that vLLM's kernel for CPUs reads.

    vLLM (0.32) does so when a model is first loaded and leaves it out when weights are replaced, so that the kernel
    would silently read the new ones in the wrong order.
    """
    for layer, kernel in _kernels(model):
        kernel.process_weights_after_loading(layer)


def map_experts(model: nn.Module) -> int:
    """Map the kernels to a worker's own experts where it has not all of them; return the number of kernels.

    vLLM (0.32) gives its kernel for CPUs the experts' numbers in the whole model and the weights of the worker's own,
    so that it reads past their end: it was seen to end in a segmentation fault. Experts that are not here get the
    weight 0. `del kernel.apply` undoes it.
    """
    kernels = [kernel for layer, kernel in _kernels(model) if layer.expert_map is not None]
    for kernel in kernels:
        kernel.apply = _mapped(kernel.apply)
    return len(kernels)


def _mapped(apply: Any) -> Any:
    def mapped(*, topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor, **others: Any) -> None:
        own = expert_map[topk_ids.long()]
        here = own >= 0
        ids = own.where(here, 0).to(topk_ids.dtype)
        weights = topk_weights * here
        apply(topk_ids=ids, topk_weights=weights, expert_map=expert_map, **others)

    return mapped


def _kernels(model: nn.Module) -> Iterator[tuple[RoutedExperts, CPUUnquantizedExperts]]:
    for layer in model.modules():
        kernel = layer.quant_method.moe_kernel if isinstance(layer, RoutedExperts) else None
        if kernel is not None and isinstance(kernel.fused_experts, CPUUnquantizedExperts):
            yield layer, kernel.fused_experts

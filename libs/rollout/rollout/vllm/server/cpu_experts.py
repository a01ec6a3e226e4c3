"""Experts on a CPU after their weights were replaced."""

from torch import nn
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


def pack_experts(model: nn.Module) -> None:
    """Bring the experts into the order that vLLM's kernel for CPUs reads.

    vLLM (0.32) does so when a model is first loaded and leaves it out when weights are replaced, so that the kernel
    would read the new ones in the wrong order, without a word.
    """
    for layer in model.modules():
        kernel = layer.quant_method.moe_kernel if isinstance(layer, RoutedExperts) else None
        if kernel is not None and isinstance(kernel.fused_experts, CPUUnquantizedExperts):
            kernel.fused_experts.process_weights_after_loading(layer)

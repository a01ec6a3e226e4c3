"""The layers of a Megatron stage by torch_npu's operators: norms, rotary embedding, SwiGLU; reversible.

As `engines.devices.npu_layers` for a transformers model. The gated norm of a delta net is a norm, then a product.
Experts stay as they are: `engines.experts.grouped_products` computes one after another there.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor, nn

from engines.config import EngineConfig
from engines.devices.adaptations import Adaptation, Applied, Patch
from engines.devices.layer_matching import with_forward
from engines.devices.npu_layers import apply_to, npu_operators_enabled
from engines.devices.npu_operators import VERSIONS, rms_norm, rotary_of_tokens, swiglu_halves
from engines.megatron.model.attention import PackedCoreAttention
from engines.megatron.model.norms import CenteredNorm, Norm


class NpuMLP(MLP):
    """A gated MLP without biases."""

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any) -> Any:
        """Run the MLP; arguments and results are those of megatron-core's."""
        product = swiglu_halves(self.linear_fc1(hidden_states)[0])
        if per_token_scale is not None:
            product = (product * per_token_scale.unsqueeze(-1)).to(product.dtype)
        return self.linear_fc2(product)


class NpuSharedExpertMLP(SharedExpertMLP, NpuMLP):
    """A shared expert whose own forward calls that of its base class, `NpuMLP`."""


def use_npu_operators(stage: nn.Module, config: EngineConfig) -> Applied | None:
    """Make a stage compute by the NPU's operators, and return what was changed; None elsewhere, and where `config`
    switches them off. ValueError for a torch_npu of another version."""
    if not npu_operators_enabled(config, next(stage.parameters()).device):
        return None
    return apply_to(stage, Adaptation("NPU operators", "torch_npu", VERSIONS, lambda: list(_patches(stage))))


def _patches(stage: nn.Module) -> Iterator[Patch]:
    for module in stage.modules():
        if isinstance(module, Norm):
            yield Patch(module, "__class__", with_forward(type(module), _norm))
        elif type(module) is PackedCoreAttention:
            yield Patch(module, "__class__", NpuCoreAttention)
        elif type(module) is SharedExpertMLP:
            yield Patch(module, "__class__", NpuSharedExpertMLP)
        elif type(module) is MLP and _is_plain(module.config):
            yield Patch(module, "__class__", NpuMLP)


def _is_plain(config: Any) -> bool:
    """Return whether no user option asks for another activation than silu(gate) * up."""
    others = (config.bias_activation_fusion, config.activation_func_clamp_value, config.glu_linear_offset)
    return config.gated_linear_unit and not any(others)


class NpuCoreAttention(PackedCoreAttention):
    """Core attention with the operator's rotary embedding."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `engines.megatron.model.attention.rotate`."""
        return rotary_of_tokens(x, cos, sin)


def _norm(self: Any, x: Tensor) -> Tensor:
    if not isinstance(self, CenteredNorm):
        return rms_norm(x, self.weight, self.eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return rms_norm(wide, self.weight.to(wide.dtype) + self.offset, self.eps).to(x.dtype)

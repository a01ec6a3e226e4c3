"""The layers of a Megatron stage by fused pieces: norms, rotary embedding, gates, SwiGLU; reversible.

Dense Qwen3.5 in bfloat16 on a GPU: what FSDP2's compiled layers need of a machine, pieces of them need too. Parallel
linears, convolution, delta rule and attention stay what they are.
"""

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn

from engines.capability import Supported, Unsupported
from engines.config import EngineConfig
from engines.devices.adaptations import Adaptation, Applied, Patch, apply
from engines.families.registry import family_of
from engines.megatron.gpu.fused_functions import DECAY, GATE, GATED_NORM, NORM, ROTATE, SWIGLU, run
from engines.megatron.model.attention import PackedCoreAttention
from engines.megatron.model.delta_net import PackedDeltaNet
from engines.megatron.model.norms import CenteredNorm
from engines.megatron.runtime.cuda_calls import VERSIONS

PIECES = Supported("megatron/gpu/fused_layers_cuda_test.py::test_a_bfloat16_curve_is_that_of_plain_layers")


def fused_pieces(
    config: EngineConfig, model_config: Any, device: torch.device, dtype: torch.dtype
) -> Supported | Unsupported:
    """Return whether a stage computes by fused pieces, with the reason where it does not."""
    if config.compile == "off":
        return Unsupported("compile='off'")
    if device.type != "cuda":
        return Unsupported("on a CPU the plain layers are as fast")
    if dtype != torch.bfloat16:
        return Unsupported("layers are fused in bfloat16 alone")
    if family_of(model_config).name != "qwen3_5":
        return Unsupported(f"only the pieces of Qwen3.5 (dense) are fused, not those of {family_of(model_config).name}")
    if config.vision != "off" or config.lora.rank:
        return Unsupported("adapters, and layers behind a vision tower, have not been run by fused pieces")
    return PIECES if find_spec("triton") is not None else Unsupported("triton is not installed")


def use_fused_pieces(stage: nn.Module, backend: str | None = "inductor") -> Applied:
    """Make a stage of dense Qwen3.5 compute by fused pieces, and return what was changed."""
    applied = vars(stage).setdefault("_adaptations", {})
    patches = list(_patches(stage, backend))
    return apply(Adaptation("fused pieces", "megatron-core", VERSIONS, lambda: patches), held=applied)


def _patches(stage: nn.Module, backend: str | None) -> Iterator[Patch]:
    fused = {
        CenteredNorm: FusedNorm,
        PackedDeltaNet: FusedDeltaNet,
        PackedCoreAttention: FusedCoreAttention,
        SelfAttention: FusedSelfAttention,
    }
    for module in stage.modules():
        if type(module) in fused:
            yield Patch(module, "__class__", _over(fused[type(module)], backend))
        elif type(module) is MLP and _is_plain(module.config):
            yield Patch(module, "__class__", _over(FusedMLP, backend))


@cache
def _over(kind: type, backend: str | None) -> type:
    return type(kind.__name__, (kind,), {"backend": backend})


def _is_plain(config: Any) -> bool:
    """Return whether no user option asks for another activation than silu(gate) * up."""
    others = (config.bias_activation_fusion, config.activation_func_clamp_value, config.glu_linear_offset)
    return config.gated_linear_unit and not any(others)


class FusedNorm(CenteredNorm):
    """A norm in one kernel."""

    backend: str | None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x."""
        return run(NORM, self.backend, x, self.weight, self.eps)


class FusedMLP(MLP):
    """A gated MLP without biases."""

    backend: str | None

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **options: Any) -> Any:
        """Run the MLP; arguments and results are those of megatron-core's."""
        if per_token_scale is not None:
            return super().forward(hidden_states, per_token_scale=per_token_scale, **options)
        return self.linear_fc2(run(SWIGLU, self.backend, self.linear_fc1(hidden_states)[0]))


class FusedCoreAttention(PackedCoreAttention):
    """Core attention with rotary embedding in one kernel."""

    backend: str | None

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `engines.megatron.model.attention.rotate`."""
        return run(ROTATE, self.backend, x, cos, sin)


class FusedSelfAttention(SelfAttention):
    """Self-attention with the gate of its output in one kernel."""

    backend: str | None

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return run(GATE, self.backend, x, gate.reshape(x.shape))


class FusedDeltaNet(PackedDeltaNet):
    """A gated delta net with decays and the gated norm in one kernel each."""

    backend: str | None

    def decays(self, a: Tensor) -> Tensor:
        """See `PackedDeltaNet.decays`."""
        return run(DECAY, self.backend, a, self.A_log, self.dt_bias)

    def gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """See `PackedDeltaNet.gated`."""
        return run(GATED_NORM, self.backend, out, gate, self.out_norm.weight, self.out_norm.eps)

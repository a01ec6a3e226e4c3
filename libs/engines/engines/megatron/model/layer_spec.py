"""Layer specifications for megatron-core: its linears, layers and experts around our norms and token mixers."""

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engines.megatron.config.model_sizes import ModelSizes
from engines.megatron.model.attention import PackedCoreAttention, PackedTokens
from engines.megatron.model.delta_net import DeltaNetParts, PackedDeltaNet
from engines.megatron.model.experts import GroupedExperts, PackedMoE
from engines.megatron.model.norms import CenteredNorm, Norm
from engines.megatron.model.router import Router
from engines.private_api import dispatch_parts


class PackedLayer(TransformerLayer):
    """A layer that tells its router which tokens it computes; its recomputation sees the same ones."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if type(self.mlp) is MoELayer:  # megatron-core knows its own class by name
            self.mlp.__class__ = PackedMoE

    def forward(self, *args: Any, packed_seq_params: PackedTokens, **kwargs: Any) -> Any:
        """Run the layer."""
        router = getattr(self.mlp, "router", None)
        with nullcontext() if router is None else router.computing(packed_seq_params):
            try:
                return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
            finally:  # computing again stops early, by an exception
                self.mlp_norm_manager = None  # megatron-core 0.19's, which remembers this layer's hidden states
                if router is not None:
                    forget_graph(self.mlp.token_dispatcher)


def forget_graph(dispatcher: Any) -> None:
    """Drop what a dispatcher of tokens remembers of a forward pass with its graph.

    Nothing reads it afterwards. But where layers are recomputed, no backward pass ever frees that graph, and it would
    keep a layer's activations until the next step, for every layer.
    """
    for part in dispatch_parts(dispatcher):
        for name, value in list(vars(part).items()):
            if isinstance(value, Tensor) and value.requires_grad:
                setattr(part, name, None)


class RecomputedLayer(PackedLayer):
    """A layer that recomputes its activations in the backward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer under torch's checkpoint: there is no dropout, so no random state to keep."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def stage_spec(sizes: ModelSizes, layers: range, recompute: bool) -> TransformerBlockSubmodules:
    """Return the specification of a stage with these decoder layers."""
    specs = [layer_of(sizes, sizes.layer_types[layer], recompute) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm_of(sizes))


def norm_of(sizes: ModelSizes) -> type[Norm]:
    """Return the class of the model's norms."""
    return CenteredNorm if sizes.gated else Norm


def layer_of(sizes: ModelSizes, kind: str, recompute: bool = False) -> ModuleSpec:
    """Return the specification of a decoder layer with this mixer."""
    norm = norm_of(sizes)
    parts = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=_delta_net(sizes) if kind == "linear_attention" else _attention(sizes),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=norm,
        mlp=_mlp(MLP) if sizes.experts is None else _experts(sizes),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=_filed_norms(sizes, kind),
    )
    return ModuleSpec(module=RecomputedLayer if recompute else PackedLayer, submodules=parts)


def _filed_norms(sizes: ModelSizes, kind: str) -> dict[str, str]:
    """Return the names of a layer's norms in megatron-core's checkpoint: Transformer Engine's are inside the linear
    after them."""
    linear = "in_proj" if kind == "linear_attention" else "linear_qkv"
    names = {"input_layernorm.": f"self_attention.{linear}.layer_norm_"}
    return names | ({"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"} if sizes.experts is None else {})


def _attention(sizes: ModelSizes) -> ModuleSpec:
    norms = {f"{x}_layernorm": norm_of(sizes) for x in "qk"} if sizes.qk_norm else {}
    parts = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=PackedCoreAttention,
        linear_proj=RowParallelLinear,
        **norms,
    )
    return ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=parts)


def _delta_net(sizes: ModelSizes) -> ModuleSpec:
    parts = DeltaNetParts(in_proj=ColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear)
    return ModuleSpec(module=PackedDeltaNet, params={"sizes": sizes.delta}, submodules=parts)


def _mlp(module: type) -> ModuleSpec:
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(module=module, submodules=parts)


def _experts(sizes: ModelSizes) -> ModuleSpec:
    assert sizes.experts is not None
    shared = _mlp(SharedExpertMLP) if sizes.experts.shared else None
    parts = MoESubmodules(experts=_mlp(GroupedExperts), shared_experts=shared, router=Router)
    return ModuleSpec(module=MoELayer, submodules=parts)

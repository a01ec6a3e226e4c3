"""The gated delta net over megatron-core's linears: packed, tensor- and sequence-parallel, context-parallel."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn
from torch.nn import functional

from engines.megatron.config.model_sizes import DeltaSizes
from engines.megatron.model.attention import PackedTokens


@dataclass
class DeltaNetParts:
    """The specifications of its linears and its norm, as megatron-core's layers have them."""

    in_proj: Any
    out_norm: Any
    out_proj: Any


class PackedDeltaNet(MegatronModule):
    """Qwen3.5's token mixer; each tensor-parallel rank has a part of the heads. Names are those of megatron-core's."""

    def __init__(
        self,
        config: Any,
        submodules: DeltaNetParts,
        layer_number: int,
        sizes: DeltaSizes,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert pg_collection is not None
        self.layer_number = layer_number
        self.sizes = sizes
        self.tp = pg_collection.tp.size()
        self.tp_group = pg_collection.tp
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        self.in_proj = build_module(
            submodules.in_proj, config.hidden_size, 2 * sizes.keys + 2 * sizes.values + 2 * sizes.value_heads,
            init_method=config.init_method, gather_output=False, skip_bias_add=False, **common,
        )  # fmt: skip
        self.out_proj = build_module(
            submodules.out_proj, sizes.values, config.hidden_size,
            init_method=config.output_layer_init_method, input_is_parallel=True, skip_bias_add=True, **common,
        )  # fmt: skip
        self.out_norm = build_module(
            submodules.out_norm, config=config, hidden_size=sizes.value_dim, eps=config.layernorm_epsilon
        )
        channels, heads = (2 * sizes.keys + sizes.values) // self.tp, sizes.value_heads // self.tp
        empty = {"dtype": config.params_dtype, "device": self.in_proj.weight.device}
        self.conv1d = nn.ParameterDict({"weight": torch.empty(channels, 1, sizes.taps, **empty)})
        self.A_log = nn.Parameter(torch.empty(heads, **empty))
        self.dt_bias = nn.Parameter(torch.empty(heads, **empty))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None = None,
        packed_seq_params: PackedTokens | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Mix tokens in each sequence: [T, 1, H] (a rank's part of T under sequence parallelism) -> the same."""
        del attention_mask
        assert packed_seq_params is not None
        context = packed_seq_params.context
        assert context is not None
        sizes = self.sizes
        joined = self.in_proj(hidden_states)[0].squeeze(1)  # all tokens, this rank's heads
        keys, values, heads = sizes.keys // self.tp, sizes.values // self.tp, sizes.value_heads // self.tp
        mixed, gate, beta, decay = joined.split([2 * keys + values, values, heads, heads], dim=-1)
        weight = self.conv1d["weight"].squeeze(1)
        mixed = context.ops.causal_conv1d(mixed.contiguous(), weight, None, context, "silu")
        q, k, v = mixed.split([keys, keys, values], dim=-1)
        tokens = len(joined)
        q, k = (part.reshape(tokens, -1, sizes.key_dim) for part in (q, k))
        v = v.reshape(tokens, -1, sizes.value_dim)
        out = context.ops.gated_delta_rule(q, k, v, self.decays(decay), beta.sigmoid(), context)
        out = self.gated(out, gate.reshape(tokens, -1, sizes.value_dim)).to(joined.dtype)
        result: tuple[Tensor, None] = self.out_proj(out.reshape(tokens, 1, -1))
        return result

    def decays(self, a: Tensor) -> Tensor:
        """Return the log decay of each token and head, [T, heads] of a [T, heads], in float32 at least."""
        wide = torch.promote_types(a.dtype, torch.float32)
        return -self.A_log.to(wide).exp() * functional.softplus(a.to(wide) + self.dt_bias.to(wide))

    def gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """Normalise out [T, heads, D] and multiply by silu(gate)."""
        wide = torch.promote_types(gate.dtype, torch.float32)
        normed: Tensor = self.out_norm(out)
        return normed.to(wide) * functional.silu(gate.to(wide))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None, **_: Any
    ) -> dict[str, Any]:
        """Return its part of megatron-core's distributed checkpoint, by the names of megatron-core's delta net."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        cut = {"A_log": self.A_log, "dt_bias": self.dt_bias, "conv1d.weight": self.conv1d["weight"]}
        out: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            cut, prefix, dict.fromkeys(cut, 0), sharded_offsets,
            tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip
        for name in ("in_proj", "out_norm", "out_proj"):
            out |= sharded_state_dict_default(
                getattr(self, name), f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        keys, values, heads = (x // self.tp for x in (self.sizes.keys, self.sizes.values, self.sizes.value_heads))
        mixed = {"query": keys, "key": keys, "value": values}
        joined = {f"{prefix}conv1d.weight": mixed, f"{prefix}in_proj.weight": {
            **mixed, "z": values, "beta": heads, "alpha": heads,
        }}  # fmt: skip
        out |= {name: in_parts(out[name], parts) for name, parts in joined.items()}
        out[f"{prefix}out_norm.weight"] = from_one(out[f"{prefix}out_norm.weight"])
        return out


def in_parts(whole: ShardedTensor, parts: Mapping[str, int]) -> ShardedTensorFactory:
    """Save the rows of each part (name: how many) as a tensor of its own, which ranks shard separately."""
    bare = whole.without_data()

    @torch.no_grad()
    def build(key: str, data: Tensor, replica: Any, flattened: slice | None = None) -> list[ShardedTensor]:
        del flattened
        every = replace(bare, key=key, data=data, dtype=data.dtype, replica_id=replica)
        out, start = [], 0
        for name, size in parts.items():
            (one,) = every.narrow(0, start, size)
            one.key = f"{key}.{name}"
            out.append(one)
            start += size
        return out

    return ShardedTensorFactory(whole.key, whole.data, build, torch.cat, whole.replica_id)


def from_one(weight: ShardedTensor) -> ShardedTensorFactory:
    """Save a norm's weight as its distance from one, exactly: in float64."""
    bare = weight.without_data()

    @torch.no_grad()
    def build(key: str, data: Tensor, replica: Any, flattened: slice | None = None) -> ShardedTensor:
        del flattened
        return replace(bare, key=key, data=data.double() - 1.0, dtype=torch.float64, replica_id=replica)

    return ShardedTensorFactory(weight.key, weight.data, build, lambda distance: distance + 1.0, weight.replica_id)

"""The layers of a Megatron-Core model that mix tokens, over one group's shards: attention, gated delta net, rotary.

Nothing here imports megatron-core: arguments of its layers are read by attribute, as `PackedSeqParams` has them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from dyncp.ops.attention import attention
from dyncp.ops.gated_delta_rule import causal_conv1d, gated_delta_rule
from dyncp.planning.methods import Method
from dyncp.planning.sizes import Layout
from dyncp.sharding.layout import Sharding
from dyncp.sharding.shards import Shard


@dataclass(frozen=True, eq=False)
class ShardParams:
    """The `packed_seq_params` of a Megatron model: where the tokens of this call lie, in any layout and group.

    The first nine fields are those of megatron-core's PackedSeqParams: the boundaries of the whole stream, padding
    included, and the group that shares it. qkv_format is "sbhd" because this rank's tokens come as one row [tokens, 1,
    hidden]; Megatron then rotates row by row, whatever the layout. sharding and position_ids i64[tokens] are ours.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    max_seqlen_q: int
    max_seqlen_kv: int
    local_cp_size: int
    cp_group: dist.ProcessGroup | None
    sharding: Sharding
    position_ids: torch.Tensor
    qkv_format: str = "sbhd"
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None

    @classmethod
    def of(cls, shard: Shard, group: dist.ProcessGroup | None) -> "ShardParams":
        """Return the params of one rank's shard; group: the ranks that share the stream, None for one."""
        sharding, positions = shard.sharding, shard.position_ids
        cu = sharding.cu_seqlens(positions.device)
        longest = max(b - a for a, b in zip(sharding.bounds, sharding.bounds[1:], strict=False))
        return cls(cu, cu, longest, longest, sharding.cp_size, group, sharding, positions)


def placement(params: Any, tokens: int, rows: int, static: Any = None) -> tuple[Sharding, dist.ProcessGroup | None]:
    """Return (sharding, group) of a call with `rows` rows of `tokens` local tokens.

    params: a ShardParams; a PackedSeqParams that Megatron made, which says zigzag over its cp_group, or over `static`
    where it has none; or None: rows of one sequence each, zigzag over `static`.
    """
    if isinstance(params, ShardParams):
        return params.sharding, params.cp_group
    group = static if getattr(params, "cp_group", None) is None else params.cp_group
    size = 1 if group is None else dist.get_world_size(group)
    layout: Layout = "contiguous" if size == 1 else "zigzag"
    group = None if size == 1 else group
    if params is not None and params.qkv_format == "thd":
        padded = params.cu_seqlens_q_padded
        return Sharding.of(params.cu_seqlens_q if padded is None else padded, size, layout), group
    return Sharding.of([tokens * size * row for row in range(rows + 1)], size, layout), group


class CoreAttention(nn.Module):
    """A replacement of DotProductAttention or TEDotProductAttention in a layer spec that calls `dyncp.attention`.

    Without parameters, so checkpoints stay as they are. ValueError for what it does not do: cross attention, other
    masks than causal, dropout, biases, sliding windows, sinks.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        method: Method = "ring",
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        refused = {
            "cross attention": attention_type != "self",
            f"mask {attn_mask_type}": "causal" not in str(attn_mask_type),
            f"attention_dropout {dropout}": dropout > 0,
            "sliding windows": getattr(config, "window_size", None) is not None,
            "attention sinks": getattr(config, "softmax_type", "vanilla") != "vanilla",
            f"cp_comm_type {cp_comm_type} (choose `method` here)": cp_comm_type is not None,
        }
        for what, present in refused.items():
            if present:
                raise ValueError(f"layer {layer_number}: dyncp's core attention does not do {what}")
        self.config = config
        self.layer_number = layer_number
        self.method = method
        self.scale = softmax_scale
        self.static_group = getattr(pg_collection, "cp", None)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Return causal attention in each sequence. query [t, heads, dim] (THD) or [s, b, heads, dim], key and value
        with fewer heads or as many; this rank's tokens. Returns [t, heads * dim] or [s, b, heads * dim].

        attention_mask is not looked at: sequences are known from the params, and the mask's type is causal.
        """
        del attention_mask
        if attention_bias is not None:
            raise ValueError("dyncp's core attention has no attention bias")
        if attn_mask_type is not None and "causal" not in str(attn_mask_type):
            raise ValueError(f"dyncp's core attention is causal, the call says {attn_mask_type}")
        rows = query.shape[1] if query.dim() == 4 else 1
        sharding, group = placement(packed_seq_params, query.shape[0], rows, self.static_group)
        q, k, v = (_one_stream(x) for x in (query, key, value))
        out = attention(q, k, v, sharding, group, self.method, sharding.layout, self.scale).flatten(1)
        if query.dim() == 3:
            return out
        return out.view(rows, query.shape[0], -1).transpose(0, 1).contiguous()


def _one_stream(x: torch.Tensor) -> torch.Tensor:
    """Reshape [s, b, heads, dim] -> [b * s, heads, dim]: row after row."""
    return x if x.dim() == 3 else x.transpose(0, 1).flatten(0, 1)


class ShardRotary(nn.Module):
    """A wrapper of a model's RotaryEmbedding: with a ShardParams it gives the angles of the shard's own positions.

    Megatron's own packed rotation assumes zigzag over its static groups. A call without ShardParams goes to `inner`.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner: Any = inner

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        """Return the params themselves: the model passes this value to `forward`, and nowhere else."""
        params = kwargs.get("packed_seq_params", args[4] if len(args) > 4 else None)
        return params if isinstance(params, ShardParams) else self.inner.get_rotary_seq_len(*args, **kwargs)

    def forward(self, max_seq_len: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the angles of each local token, f32[tokens, 1, 1, dim]."""
        if not isinstance(max_seq_len, ShardParams):
            angles: torch.Tensor = self.inner(max_seq_len, *args, **kwargs)
            return angles
        table = self.inner(max_seq_len.max_seqlen_q, packed_seq=True)
        result: torch.Tensor = table.index_select(0, max_seq_len.position_ids)
        return result


class ShardDeltaNet(nn.Module):
    """The class of a megatron-core GatedDeltaNet that takes packed sequences and groups of ranks, before its own.

    A call without packed_seq_params is the original's.
    """

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, packed_seq_params: Any = None, **others: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the layer on [tokens, batch, hidden]."""
        layer: Any = self
        if packed_seq_params is None:
            plain: tuple[torch.Tensor, torch.Tensor | None] = super().forward(
                hidden_states, attention_mask, packed_seq_params=None, **others
            )
            return plain
        unsupported = [name for name, value in others.items() if value is not None and name in _NOT_PACKED]
        if unsupported:
            raise ValueError(f"a packed gated delta net takes no {', '.join(unsupported)}")
        sharding, group = placement(packed_seq_params, hidden_states.shape[0], hidden_states.shape[1])
        mixed, bias = layer.in_proj(hidden_states)
        if bias is not None:
            mixed = mixed + bias
        out = _mix(layer, mixed.transpose(0, 1).flatten(0, 1), sharding, group)
        out = out.view(hidden_states.shape[1], hidden_states.shape[0], -1).transpose(0, 1).contiguous()
        result: tuple[torch.Tensor, torch.Tensor | None] = layer.out_proj(out)
        return result


_NOT_PACKED = ("key_value_states", "inference_context", "inference_params", "attention_bias", "sequence_len_offset")


def _mix(layer: Any, x: torch.Tensor, sharding: Sharding, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Run convolution, recurrence and gated norm on projected tokens x [tokens, in_proj_dim] -> [tokens, v_dim].

    As megatron-core computes it, with float32 where it says so (float64 stays).
    """
    tokens, wide = len(x), torch.promote_types(x.dtype, torch.float32)
    qkv, gate, beta, alpha = x.split(
        [2 * layer.qk_dim + layer.v_dim, layer.v_dim, layer.num_value_heads, layer.num_value_heads], dim=-1
    )
    conv = layer.conv1d
    qkv = causal_conv1d(
        qkv.contiguous(), conv.weight.squeeze(1), conv.bias, sharding, group, "silu", layout=sharding.layout
    )
    q, k, v = qkv.split([layer.qk_dim, layer.qk_dim, layer.v_dim], dim=-1)
    q, k = (part.reshape(tokens, -1, layer.key_head_dim) for part in (q, k))
    v = v.reshape(tokens, -1, layer.value_head_dim)
    decay = -layer.A_log.to(wide).exp() * functional.softplus(alpha.to(wide) + layer.dt_bias)
    out = gated_delta_rule(
        q, k, v, decay, beta.sigmoid(), sharding, group, l2norm_qk=layer.use_qk_l2norm, layout=sharding.layout
    )
    normed = layer.out_norm(out.reshape(-1, layer.value_head_dim))
    gated = normed * functional.silu(gate.reshape(-1, layer.value_head_dim).to(wide))
    result: torch.Tensor = gated.to(x.dtype).reshape(tokens, -1)
    return result

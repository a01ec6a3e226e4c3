"""Megatron-Core (0.16) over the groups of a plan: a layer spec, an adaptation of a built model, micro-batches.

Build the model with context_parallel_size=1: Megatron's data-parallel ranks are the whole world, and the groups that
share long sequences are the plan's, another set in every step if need be. Set calculate_per_token_loss=True, so that
its DDP sums gradients; each rank divides its loss sum by `plan.trained_tokens`, and any plan gives the same gradient.

    spec = with_core_attention(get_gpt_layer_local_spec(), method="ulysses")
    model = GPTModel(config, spec, ..., position_embedding_type="rope")
    adapt(model)                                        # rotary positions of shards, packed gated delta nets
    made = plan(lengths, world, cap, cost_model(model), method="ulysses", trained_tokens=count_trained(batch))
    groups.prepare(made)  # ValueError on every rank where plans differ
    for micro in micro_batches(batch, made, groups, rank):
        losses = ddp(micro.input_ids, micro.position_ids, None, labels=micro.labels, packed_seq_params=micro.params)
        (losses * micro.loss_mask).sum().div(made.trained_tokens).backward()
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from dyncp.comm.process_groups import ProcessGroups
from dyncp.megatron.layers import CoreAttention, ShardDeltaNet, ShardParams, ShardRotary
from dyncp.planning.cost import CostModel
from dyncp.planning.methods import Method
from dyncp.planning.types import DynamicPlan
from dyncp.sharding.shards import pack_group, shard
from seqpack.adapters.subclasses import remove_mixin, set_mixin
from seqpack.batches.batch import view_batch
from seqpack.planning.flops import ModelFlops, delta_net, full_attention, mlp


def with_core_attention(spec: Any, method: Method = "ring") -> Any:
    """Return a copy of a layer's or block's spec whose self attention layers use `CoreAttention` with this method.

    ValueError where the spec has no attention layer with a core attention.
    """
    spec = copy.deepcopy(spec)
    layers = getattr(spec, "layer_specs", None) or [spec]
    replaced = 0
    for layer in layers:
        inner = layer.submodules.self_attention.submodules
        if hasattr(inner, "core_attention"):
            inner.core_attention = partial(CoreAttention, method=method)
            replaced += 1
    if not replaced:
        raise ValueError("no layer of this spec has a core_attention: give the spec of a layer with self attention")
    return spec


@dataclass
class Adaptation:
    """What `adapt` changed; `undo()` puts it back."""

    model: nn.Module
    changes: tuple[str, ...]
    rotary: nn.Module | None
    delta_nets: tuple[nn.Module, ...]

    def undo(self) -> None:
        """Restore the model as it was; a second call does nothing."""
        if self.rotary is not None:
            self.model.rotary_pos_emb = self.rotary
        for layer in self.delta_nets:
            remove_mixin(layer, ShardDeltaNet)
        self.rotary, self.delta_nets = None, ()


def adapt(model: Any) -> Adaptation:
    """Change a built GPTModel so that it takes `ShardParams`: this instance alone; calls without them stay the same.

    Its rotary embedding follows each shard's positions; each GatedDeltaNet runs packed, over groups of ranks.
    ValueError for what is not known to be right: other attention than `with_core_attention` gave, tensor, pipeline,
    expert or Megatron's own context parallelism, latent attention, mixtures of experts, multi-token prediction, and
    rotary embeddings other than the plain one.
    """
    _refuse(model)
    changes: list[str] = []
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is not None:
        model.rotary_pos_emb = ShardRotary(rotary)
        changes.append("rotary_pos_emb: follows the shard's positions")
    delta_nets = {name: m for name, m in model.named_modules() if type(m).__name__ == "GatedDeltaNet"}
    for name, layer in delta_nets.items():
        set_mixin(layer, ShardDeltaNet)
        changes.append(f"{name}: class")
    return Adaptation(model, tuple(changes), rotary, tuple(delta_nets.values()))


def _refuse(model: Any) -> None:
    config = model.config
    parallel = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    for name in (*parallel, "context_parallel_size"):
        if getattr(config, name, 1) != 1:
            raise ValueError(f"dyncp plans over the whole world and {name} is {getattr(config, name)}: set it to 1")
    rotary = getattr(model, "rotary_pos_emb", None)
    names = {name: type(module).__name__ for name, module in model.named_modules()}
    refused = {
        "multi-head latent attention": getattr(config, "multi_latent_attention", False),
        "mixtures of experts": getattr(config, "num_moe_experts", None),
        "multi-token prediction": getattr(config, "mtp_num_layers", None),
        "sequence parallelism": getattr(config, "sequence_parallel", False),
        f"{type(rotary).__name__}": rotary is not None and type(rotary).__name__ != "RotaryEmbedding",
        "Mamba layers": any("Mamba" in kind for kind in names.values()),
        "gated delta nets with another activation than silu": any(
            kind == "GatedDeltaNet" and model.get_submodule(name).activation not in ("silu", "swish")
            for name, kind in names.items()
        ),
    }
    for what, present in refused.items():
        if present:
            raise ValueError(f"dyncp is not known to be right with {what} in Megatron: not adapted")
    foreign = [name for name, kind in names.items() if name.endswith("core_attention") and kind != "CoreAttention"]
    if foreign:
        raise ValueError(
            f"{foreign[0]} is a {names[foreign[0]]}, which knows nothing of a plan's groups: build the model from "
            "with_core_attention(spec)"
        )


def cost_model(model: Any, **options: Any) -> CostModel:
    """Return the cost model of this GPTModel for plans: heads and layer types, so that plans refuse what it cannot run,
    and its operations, as seqpack counts them (options: as in `CostModel.of`). Calibrate for better numbers."""
    config = model.config
    feed_forward = mlp(config.hidden_size, config.ffn_hidden_size, 3 if config.gated_linear_unit else 2)
    attention = full_attention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_query_groups,
        config.kv_channels,
        feed_forward,
        gated=config.attention_output_gate,
    )
    delta_nets = [module for module in model.modules() if type(module).__name__ == "GatedDeltaNet"]
    layers = [attention] * (config.num_layers - len(delta_nets))
    layers += [
        delta_net(
            config.hidden_size,
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
            feed_forward,
        )
        for _ in delta_nets
    ]
    return CostModel.of(ModelFlops(tuple(layers), 2.0 * config.hidden_size * model.vocab_size), **options)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """This rank's part of one step of a plan.

    input_ids, position_ids, labels: i64[1, tokens]; the label is the next token of the same sequence, wherever that one
    lies. loss_mask: f32[1, tokens], 1 where the label is trained. values: the batch's other per-token tensors at these
    tokens, aligned to input_ids. params: the model's packed_seq_params. sample_ids: empty for a dummy of one token.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    values: dict[str, torch.Tensor]
    params: ShardParams
    sample_ids: tuple[int, ...]


def micro_batches(
    batch: TensorDict,
    plan: DynamicPlan,
    groups: ProcessGroups,
    rank: int,
    device: torch.device | str | None = None,
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of one rank: one for each step of the plan, so that every rank has as many.

    batch: the global batch with input_ids and loss_mask (B, j). groups: after `groups.prepare(plan)` on every rank.
    Tokens are padded by the plan's `align`. ValueError where the batch is not the plan's or has no loss_mask.
    """
    if batch.batch_size[0] != len(plan.lengths):
        raise ValueError(f"the plan was made for {len(plan.lengths)} samples, the batch has {batch.batch_size[0]}")
    if "loss_mask" not in batch.keys():  # noqa: SIM118  a TensorDict iterates over its rows
        raise ValueError("the batch has no loss_mask: say which tokens are trained")
    view = view_batch(batch)
    for step in plan.steps:
        group = step.group_of(rank)
        packed = pack_group(view, group.sample_ids, group.cp_size, plan.layout, plan.align)
        # A sequence's first token is never trained (the schema says so), so no label crosses into the next sequence.
        labels, wanted = packed.values["input_ids"].roll(-1), packed.values["loss_mask"].roll(-1)
        packed = packed.with_values(labels=labels, label_mask=wanted.float())
        part = shard(
            packed if device is None else packed.to(device), group.ranks.index(rank), group.cp_size, plan.layout
        )
        values = dict(part.values)
        input_ids, labels, loss_mask = (values.pop(key)[None] for key in ("input_ids", "labels", "label_mask"))
        params = ShardParams.of(part, groups.get(group.ranks))
        yield MicroBatch(input_ids, part.position_ids[None], labels, loss_mask, values, params, group.sample_ids)


def count_trained(batch: TensorDict) -> int:
    """Return the number of trained tokens of a global batch, for `plan(trained_tokens=...)`."""
    return sum(int(mask.sum()) for mask in batch["loss_mask"].unbind())

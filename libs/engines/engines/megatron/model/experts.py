"""Experts of a Megatron stage in grouped products, over the matrices of all experts that a rank has in one tensor.

megatron-core's `SequentialMLP` computes one expert after another; its grouped ones want packages of their own, and
matrices the other way round. Here the products are those of `engines.experts`, which FSDP2's compiled layers have too.

Where a rank has all experts whole, no token goes to another rank: a layer then needs no dispatcher, whose permutations,
masks and copies of chunks are most of its time for many small experts.
"""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from engines.experts.adapted_experts import AdaptedExperts, LowRank, adapted_rows, adapted_tokens
from engines.experts.grouped_experts import routed_experts, sorted_experts

OTHER_WAYS = ("moe_shared_expert_overlap", "moe_latent_size", "moe_router_fusion", "moe_apply_probs_on_input")
"""Options of megatron-core's for which a layer stays with its dispatcher."""


class GroupedExperts(MegatronModule):
    """The E experts of a rank: rows of `gate_up_proj` [E 2 I, H], each expert's gate over its up, and of `down_proj`
    [E H, I]; I is the rank's part of their width."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        """Allocate the matrices; arguments are those of megatron-core's experts."""
        super().__init__(config=config)
        self.number, self.parts, self.groups = num_local_experts, submodules, pg_collection
        width, dtype = config.moe_ffn_hidden_size // pg_collection.expt_tp.size(), config.params_dtype
        rows = num_local_experts * 2 * width, num_local_experts * config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(rows[0], config.hidden_size, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(rows[1], width, dtype=dtype))
        self.adapters: Any = None
        """The switch of the adapters (`engines.megatron.weights.expert_adapters`), where there are any."""

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """Views [E, 2 I, H] and [E, H, I]."""
        up, down = self.gate_up_proj, self.down_proj
        return up.view(self.number, -1, up.shape[1]), down.view(self.number, -1, down.shape[1])

    @property
    def adapted(self) -> bool:
        """Whether it computes with adapters now."""
        return self.adapters is not None and self.adapters.on

    @property
    def with_adapters(self) -> AdaptedExperts:
        """The matrices with their adapters."""
        return AdaptedExperts(*self.matrices, self._low_rank("gate_up_proj"), self._low_rank("down_proj"))

    def _low_rank(self, name: str) -> LowRank | None:
        stacks = [getattr(self, f"{name}_lora_{part}", None) for part in "AB"]
        a, b = (None if one is None else one.view(self.number, -1, one.shape[1]) for one in stacks)
        return None if a is None or b is None else LowRank(a, b, self.adapters.scale)

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Return (results [S, H], no bias) of rows [S, H] sorted by expert, and their weights [S]."""
        ends = tokens_per_expert.cumsum(0).to(rows.device, torch.int32)
        if self.adapted:
            return adapted_rows(rows, probs, self.with_adapters, ends), None
        return sorted_experts(rows, probs, *self.matrices, ends), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return what megatron-core's own experts would: a matrix each, here a view."""
        stock = SequentialMLP(self.number, self.config, self.parts, self.groups)
        for one, up, down in zip(stock.local_experts, *(part.detach() for part in self.matrices), strict=True):
            one.linear_fc1.weight, one.linear_fc2.weight = nn.Parameter(up), nn.Parameter(down)
        out: dict[str, Any] = stock.sharded_state_dict(prefix, sharded_offsets, metadata)
        return out


class PackedMoE(MoELayer):
    """Routed experts, and the shared one: without a dispatcher where all experts are on every rank."""

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
        """Return ([t, 1, H], no bias) of hidden states [t, 1, H]."""
        if not self._alone:
            out: tuple[Tensor, None] = super().forward(hidden_states, *args, **options)
            return out
        shared = self.shared_experts(hidden_states) if self.use_shared_expert else None
        probs, _ = self.router(hidden_states)
        experts = self.router.taken
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        weights = probs.gather(1, experts)
        if self.experts.adapted:
            routed = adapted_tokens(flat, experts, weights, self.experts.with_adapters)
        else:
            routed = routed_experts(flat, experts, weights, *self.experts.matrices)
        result = routed.view_as(hidden_states)
        return (result if shared is None else result + shared), None

    @property
    def _alone(self) -> bool:
        plain = not any(getattr(self.config, name, None) for name in OTHER_WAYS)
        graphs = getattr(self.config, "cuda_graph_impl", "none") != "none"
        return plain and not graphs and self.ep_group.size() == self.experts.groups.expt_tp.size() == 1

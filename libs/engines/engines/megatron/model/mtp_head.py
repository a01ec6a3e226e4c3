"""The head for multi-token prediction (`engines.mtp.head`) of megatron-core's layers, on the last stage.

It computes the tokens between layers that a rank has (a part of them under sequence parallelism), so that its norms and
`fc` are whole on every tensor-parallel rank, and their gradients are added up there; its layer is split as the others
are. What it reads of the model has no gradient: hidden states, the output layer, and the embedding, of which a last
stage without one gets a copy before each step.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from engines.execution.executor import MTPScores
from engines.inputs.model_inputs import ModelInputs
from engines.megatron.config.model_sizes import ModelSizes
from engines.megatron.model.attention import PackedTokens
from engines.megatron.model.layer_spec import layer_of, norm_of
from engines.scoring.log_probs import several_log_probs


class MTPStage(nn.Module):
    """See the module's text."""

    def __init__(self, sizes: ModelSizes, config: TransformerConfig, vp_stage: int | None) -> None:
        super().__init__()
        norm = norm_of(sizes)
        self.config = config
        self.pre_fc_norm_embedding = norm(config, sizes.hidden, eps=sizes.eps)
        self.pre_fc_norm_hidden = norm(config, sizes.hidden, eps=sizes.eps)
        self.fc = nn.Linear(2 * sizes.hidden, sizes.hidden, bias=False, dtype=config.params_dtype)
        self.fc.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.layer: Any = build_module(layer_of(sizes, "full_attention"), config=config, vp_stage=vp_stage)
        self.norm = norm(config, sizes.hidden, eps=sizes.eps)
        self.copy: Tensor | None = None
        """The embedding of the first stage, where this one has none."""

    def forward(self, hidden: Tensor, following: Tensor, packed: PackedTokens) -> Tensor:
        """Return what the output layer reads, [T, H] of all tokens, from hidden states [t, 1, H] of this rank's tokens
        and the embeddings [t, 1, H] of those after them."""
        x = torch.cat([self.pre_fc_norm_embedding(following), self.pre_fc_norm_hidden(hidden)], -1)
        x, _ = self.layer(self.fc(x), attention_mask=None, packed_seq_params=packed)
        x = self.norm(x)
        if self.config.sequence_parallel:
            x = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True)
        states: Tensor = x.squeeze(1)
        return states


def mtp_scores(
    stage: Any, inputs: ModelInputs, hidden: Tensor, packed: PackedTokens, temperature: float, chunk: int,
    vocabulary: range,
) -> MTPScores:  # fmt: skip
    """Return the scores of `inputs.mtp.targets` from the last stage's hidden states [t, 1, H] of this rank's tokens."""
    head, mtp = stage.mtp_head, inputs.mtp
    assert mtp is not None, "the builder makes the inputs of a head that is trained"
    group = parallel_state.get_tensor_model_parallel_group()
    with torch.no_grad():
        following = _embedded(_embedding(stage), mtp.ids, group, vocabulary)
        rank, size = (group.rank(), group.size()) if stage.config.sequence_parallel else (0, 1)
        following = following.chunk(size)[rank].unsqueeze(1)
    x = head(hidden.detach(), following, replace(packed, counted=None, experts=None))
    chosen, weight = x.index_select(0, mtp.rows), stage.head[: len(vocabulary)].detach()
    shared = {"group": group, "first": vocabulary.start} if group.size() > 1 else {}
    log_probs, _, likeliest = several_log_probs(chosen, weight, mtp.targets, 1, temperature, chunk, **shared)
    hits = (likeliest.tokens[:, 0] == mtp.targets).to(log_probs.dtype)
    return MTPScores(log_probs * mtp.valid, hits * mtp.valid)


@torch.no_grad()
def share_embedding(stages: Sequence[Any], tied: bool) -> None:
    """Give the last stage the first one's embedding, as it is before a step. Collective over both; nothing where the
    last stage has it: it is the first too, or its output layer is tied to it."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    last = parallel_state.get_pipeline_model_parallel_world_size() - 1
    if tied or last == 0 or stage not in (0, last):
        return
    group = parallel_state.get_embedding_group()
    first = parallel_state.get_pipeline_model_parallel_first_rank()
    if stage == 0:
        dist.broadcast(stages[0].embedding.word_embeddings.weight.detach(), first, group=group)
        return
    model = stages[-1]
    if model.mtp_head.copy is None:
        model.mtp_head.copy = torch.empty_like(model.output_layer.weight)
    dist.broadcast(model.mtp_head.copy, first, group=group)


def _embedding(stage: Any) -> Tensor:
    """Return this rank's rows of the embedding."""
    if stage.pre_process:
        own: Tensor = stage.embedding.word_embeddings.weight
        return own
    copy: Tensor | None = stage.head if stage.share_embeddings_and_output_weights else stage.mtp_head.copy
    assert copy is not None, "it was shared before the step"
    return copy


def _embedded(weight: Tensor, ids: Tensor, group: dist.ProcessGroup, vocabulary: range) -> Tensor:
    """Return the embeddings [T, H] of tokens, of which each tensor-parallel rank has some rows."""
    own = (ids >= vocabulary.start) & (ids < vocabulary.stop)
    rows = weight[(ids - vocabulary.start).clamp(0, len(vocabulary) - 1)] * own.unsqueeze(-1)
    if group.size() > 1:
        dist.all_reduce(rows, group=group)
    return rows

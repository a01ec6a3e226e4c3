"""megatron-core's GPTModel for packed tokens: no rotary embedding of its own, hidden states out of the last stage."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from engines.families.registry import family_of
from engines.megatron.config.model_sizes import ModelSizes
from engines.megatron.model.attention import PackedTokens
from engines.megatron.model.experts import GroupedExperts
from engines.megatron.model.layer_spec import stage_spec
from engines.megatron.model.mtp_head import MTPStage
from engines.megatron.model.vision import Features
from engines.parallel.layout import ParallelLayout
from engines.parallel.stages import Split, stage_layers


class PackedGPT(GPTModel):
    """A virtual stage of a decoder. The last one gives normed hidden states: log-probs come from them in chunks."""

    def forward(self, input_ids: Tensor, packed: PackedTokens, features: Features | None) -> Tensor:
        """Run the stage; the first one embeds `input_ids` [1, T], with features at the places of their tokens."""
        embedded = None
        if self.pre_process and features is not None:
            embedded = features.put(self.embedding(input_ids=input_ids, position_ids=None))
        out: Tensor = super().forward(input_ids, None, None, decoder_input=embedded, packed_seq_params=packed)
        return out

    def setup_embeddings_and_output_layer(self) -> None:
        """Do nothing: weights come from the bridge, a tied embedding's second copy too."""

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    @property
    def head(self) -> Tensor:
        """The rows of the output layer on this rank."""
        tied = self.share_embeddings_and_output_weights and self.pre_process
        weight: Tensor = self.embedding.word_embeddings.weight if tied else self.output_layer.weight
        return weight


def build_stages(
    sizes: ModelSizes, layout: ParallelLayout, config: TransformerConfig, split: Split, recompute: bool
) -> list[PackedGPT]:
    """Build this rank's virtual stages (one without a virtual pipeline), their weights not set."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    chunks = len(split[stage])
    out = []
    for chunk in range(chunks):
        layers = stage_layers(split, stage, chunk)
        model = PackedGPT(
            config,
            stage_spec(sizes, layers, recompute),
            sizes.vocab_rows(layout.tp) * layout.tp,
            0,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == layout.pp - 1 and chunk == chunks - 1,
            share_embeddings_and_output_weights=sizes.tied,
            position_embedding_type="none",
            vp_stage=chunk if chunks > 1 else None,
        )
        if sizes.mtp and model.post_process:
            model.mtp_head = MTPStage(sizes, config, chunk if chunks > 1 else None)
        mark_experts(model)
        if sizes.experts is not None:  # then every layer is routed
            for number, layer in zip(layers, model.decoder.layers, strict=True):
                layer.mlp.router.layer = number
        if model.pre_process and sizes.padding is not None:
            model.embedding.register_forward_hook(WithoutPaddingGradient(sizes.padding, config), with_kwargs=True)
        out.append(model)
    return out


class WithoutPaddingGradient:
    """A hook of Megatron's embedding that gives the padding token no gradient, as torch's `padding_idx` does.

    That row begins at zero, and a norm behind it would give it a huge gradient.
    """

    def __init__(self, padding: int, config: TransformerConfig) -> None:
        self.padding = padding
        self.split = config.sequence_parallel

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> Tensor:
        """Return `hidden` [tokens of this rank, 1, H] of the ids [1, tokens], without a gradient at padding tokens."""
        ids = (kwargs["input_ids"] if "input_ids" in kwargs else args[0]).t()
        if self.split:
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            ids = ids.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        return torch.where((ids == self.padding).unsqueeze(-1), hidden.detach(), hidden)


def mark_experts(model: torch.nn.Module) -> None:
    """Make the gradients of experts be summed over the ranks with the same experts.

    megatron-core does so itself for expert_parallel > 1 alone: under tensor parallelism without it an expert's gradient
    would silently lack the tokens of the other tensor-parallel ranks.
    """
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            for parameter in module.parameters():
                parameter.allreduce = False


def rotary_of(module: Any) -> torch.nn.Module:
    """Return the rotary embedding of a transformers model: its angles are a pure function of positions."""
    rotary: torch.nn.Module = family_of(module.config).decoder(module).rotary_emb
    return rotary


def angles(rotary: Any, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, R] at positions i64[T] or [axes, T], in the dtype of `like`."""
    if positions.ndim == 1:
        axes = positions.unsqueeze(0)
        if hasattr(rotary, "mrope_section"):
            axes = axes.expand(3, 1, -1)
    else:
        axes = positions[-3:].unsqueeze(1)  # a fourth row before them counts tokens
    cos, sin = rotary(like, axes)
    return cos.squeeze(0), sin.squeeze(0)

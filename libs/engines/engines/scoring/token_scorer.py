"""The module that FSDP shards: a causal LM that scores chosen tokens instead of returning logits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engines.execution.executor import MTPScores, Several
from engines.experts.routers import Routers
from engines.families.registry import family_of
from engines.families.router import Routing
from engines.inputs.model_inputs import ModelInputs
from engines.media.vision_embeddings import embeddings
from engines.scoring.log_probs import scored, token_log_probs
from engines.scoring.mtp_scores import mtp_scores
from engines.scoring.plain_scores import plain_log_probs
from engines.scoring.read_rows import READ
from seqpack.adapters.mixers import packed_output


class ModelScores(NamedTuple):
    """The scores of `ModelInputs.targets`: log_probs f32[N], and entropy f32[N] where asked for.

    `routing`: what the router's loss needs, where there is one. `load` f32[layers, E]: how many tokens went to each
    expert; None of a model without experts. `several`: see `Scores`. `mtp`: of `ModelInputs.mtp.targets`.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    routing: Routing | None = None
    load: Tensor | None = None
    several: Several | None = None
    mtp: MTPScores | None = None


class TokenScorer(nn.Module):
    """A wrapper of a Hugging Face causal LM; everything that touches weights happens inside its forward."""

    model: Any
    logit_chunk: int

    def __init__(
        self,
        model: Any,
        logit_chunk: int,
        log_probs: Callable[..., Any] = token_log_probs,
        router_aux_loss_coef: float | None = None,
        router_z_loss_coef: float = 0.0,
    ) -> None:
        super().__init__()
        self.log_probs = log_probs
        self.family = family_of(model.config)
        self.family.check_module(model)
        self.router = self.family.auxiliary_loss(model.config, router_aux_loss_coef, router_z_loss_coef)
        self.routers = Routers.of(model)
        self.scale = self.family.head_scale(model.config)
        cap = self.family.soft_cap(model.config)
        self.head_options: dict[str, Any] = {} if cap is None else {"soft_cap": cap}
        self.model = model
        self.logit_chunk = logit_chunk

    def forward(
        self,
        inputs: ModelInputs,
        temperature: float,
        entropy: bool,
        routing: bool = False,
        head: bool = True,
        plain: bool = False,
        several: Tensor | int = 0,
        mtp: bool = False,
    ) -> ModelScores:
        """Score inputs.targets, and `several` tokens at each; `routing` sums up the router's choices, where the config
        asks for its loss. Without `head` there are no scores, only these sums. `plain`: by the stock model
        (`engines.scoring.plain_scores`). `mtp`: by the head for multi-token prediction too.

        Connected to every layer even when N is 0, so that a rank with nothing to do takes part in all collectives.
        """
        if plain:
            return ModelScores(plain_log_probs(self, inputs, temperature))
        options = {"output_router_logits": True} if routing and self.router is not None else {}
        if self.routers is not None:
            self.routers.begin(inputs.experts)
        output, embedded = self._base_output(inputs, options, every_row=mtp)
        routed = None if self.routers is None else self.routers.end(inputs.counted)
        load = None if routed is None or self.routers is None else routed.load(self.routers.experts)
        given = None if routed is None or inputs.experts is None else routed.experts
        if not head and self.router is not None:
            sums = self.router.routing(output.router_logits, inputs.counted, given)
            return ModelScores(output.last_hidden_state.new_zeros(0), routing=sums)
        chosen = output.last_hidden_state.flatten(0, 1).index_select(0, inputs.rows)
        chosen, weight = _with_bias(chosen, self.family.head(self.model))
        arguments = (several, temperature / self.scale, self.logit_chunk, entropy)
        log_probs, entropies, taken = scored(
            self.log_probs, (chosen, weight, inputs.targets), *arguments, **self.head_options
        )
        further = None
        if mtp:
            states = self.family, self.model, inputs, output.last_hidden_state, embedded
            further = mtp_scores(*states, temperature / self.scale, self.logit_chunk)
        if not options or self.router is None:
            return ModelScores(log_probs, entropies, load=load, several=taken, mtp=further)
        sums = self.router.routing(output.router_logits, inputs.counted, given)
        return ModelScores(log_probs, entropies, sums, load, taken, further)

    def _base_output(self, inputs: ModelInputs, options: dict[str, bool], every_row: bool) -> tuple[Any, Tensor | None]:
        """Return the decoder's output, and the embeddings that it got where there are images."""
        decoder, tower, embedded = self.family.decoder(self.model), self.family.tower(self.model), None
        if tower is not None:
            assert inputs.vision is not None, "the inputs of a vision-language model have something to see"
            embedded = embeddings(decoder, tower, inputs.input_ids, inputs.vision)
        if inputs.context is not None:
            read = inputs.rows if inputs.read is None else inputs.read
            inputs.context.derived[READ] = None if every_row else read
            output = packed_output(
                self.model, inputs.input_ids, inputs.position_ids, inputs.context, decoder, embedded, **options
            )
            return output, embedded
        output = decoder(
            **({"input_ids": inputs.input_ids} if embedded is None else {"inputs_embeds": embedded}),
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
            use_cache=False,
            **options,
        )
        return output, embedded


def _with_bias(hidden: Tensor, head: Any) -> tuple[Tensor, Tensor]:
    """Return hidden states [N, H] and the head's weight [V, H]; with a column more each where the head has a bias."""
    if head.bias is None:
        return hidden, head.weight
    ones = hidden.new_ones(hidden.shape[0], 1)
    return torch.cat([hidden, ones], 1), torch.cat([head.weight, head.bias[:, None]], 1)

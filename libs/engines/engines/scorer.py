"""The module that FSDP shards: a causal LM that scores chosen tokens instead of returning logits."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from engines.execution.inputs import ModelInputs
from engines.families.registry import family_of
from engines.families.router import Routing
from engines.log_probs import token_log_probs
from engines.packing.model import packed_output


class ModelScores(NamedTuple):
    """Of `ModelInputs.targets`: log_probs f32[N], entropy f32[N] where asked for; what the router chose, likewise."""

    log_probs: Tensor
    entropy: Tensor | None = None
    routing: Routing | None = None


class TokenScorer(nn.Module):
    """Wraps a Hugging Face causal LM; everything that touches weights happens inside this module's forward."""

    model: Any
    logit_chunk: int

    def __init__(self, model: Any, logit_chunk: int) -> None:
        super().__init__()
        self.family = family_of(model.config)
        self.family.check_module(model)
        self.router = self.family.auxiliary_loss(model.config)
        self.model = model
        self.logit_chunk = logit_chunk

    def forward(self, inputs: ModelInputs, temperature: float, entropy: bool, routing: bool = False) -> ModelScores:
        """Score inputs.targets; `routing` sums up what the router chose, where the config asks for its loss.

        Connected to every layer even when N is 0, so that a rank with nothing to do takes part in all collectives.
        """
        options = {"output_router_logits": True} if routing and self.router is not None else {}
        output = self._base_output(inputs, options)
        chosen = output.last_hidden_state.flatten(0, 1).index_select(0, inputs.rows)
        weight = self.family.head(self.model).weight
        log_probs, entropies = token_log_probs(chosen, weight, inputs.targets, temperature, self.logit_chunk, entropy)
        if not options or self.router is None:
            return ModelScores(log_probs, entropies)
        return ModelScores(log_probs, entropies, self.router.routing(output.router_logits, inputs.counted))

    def _base_output(self, inputs: ModelInputs, options: dict[str, bool]) -> Any:
        if inputs.context is not None:
            return packed_output(self.model, inputs.input_ids, inputs.position_ids, inputs.context, **options)
        return self.model.base_model(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
            use_cache=False,
            **options,
        )

"""The module that FSDP shards: a causal LM that scores chosen tokens instead of returning logits."""

from typing import Any

from torch import Tensor, nn

from engines.execution.inputs import ModelInputs
from engines.families.registry import family_of
from engines.log_probs import token_log_probs
from engines.packing.model import packed_hidden


class TokenScorer(nn.Module):
    """Wraps a Hugging Face causal LM; everything that touches weights happens inside this module's forward."""

    model: Any
    logit_chunk: int

    def __init__(self, model: Any, logit_chunk: int) -> None:
        super().__init__()
        self.family = family_of(model.config)
        self.family.check_module(model)
        self.model = model
        self.logit_chunk = logit_chunk

    def forward(self, inputs: ModelInputs, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """(log_probs f32[N], entropies f32[N] or None) of inputs.targets.

        Connected to every layer even when N is 0, so that a rank with nothing to do takes part in all collectives.
        """
        if inputs.context is not None:
            hidden = packed_hidden(self.model, inputs.input_ids, inputs.position_ids, inputs.context)
        else:
            hidden = _padded_hidden(self.model, inputs).flatten(0, 1)
        chosen = hidden.index_select(0, inputs.rows)
        weight = self.family.head(self.model).weight
        log_probs, entropies = token_log_probs(chosen, weight, inputs.targets, temperature, self.logit_chunk, entropy)
        return log_probs, entropies


def _padded_hidden(model: Any, inputs: ModelInputs) -> Tensor:
    return model.base_model(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        position_ids=inputs.position_ids,
        use_cache=False,
    ).last_hidden_state

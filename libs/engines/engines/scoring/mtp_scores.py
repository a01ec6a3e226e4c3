"""What the head predicts in a packed or padded call: log-probs of the trained tokens that have two before them."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask

from engines.execution.executor import MTPScores
from engines.families.family import Family
from engines.inputs.model_inputs import InputBuilder, ModelInputs
from engines.scoring.log_probs import several_log_probs
from seqpack.adapters.boundaries import no_mask
from seqpack.adapters.context import CONTEXT_KEY


def mtp_scores(
    family: Family,
    model: Any,
    inputs: ModelInputs,
    hidden: Tensor,
    embedded: Tensor | None,
    temperature: float,
    chunk: int,
) -> MTPScores:
    """Return the scores of `inputs.mtp.targets` from the decoder's last hidden states; nothing flows back into the
    model.

    `embedded` [T, H]: what the decoder got in the place of embeddings, where images are among the tokens.
    """
    head, decoder, mtp = model.mtp, family.decoder(model), inputs.mtp
    assert mtp is not None, "the builder makes the inputs of a head that is trained"
    hidden = hidden.detach()
    with torch.no_grad():
        following = decoder.embed_tokens(mtp.ids).view(hidden.shape)
        if embedded is not None:
            following = embedded.detach().roll(-1, -2).view(hidden.shape)
        weight = family.head(model).weight.detach()
    positions = _positions(inputs)
    angles = decoder.rotary_emb(hidden, positions[-3:])
    x = head(hidden, following, angles, **_masks(decoder, hidden, inputs, positions))
    chosen = x.flatten(0, -2).index_select(0, mtp.rows)
    log_probs, _, likeliest = several_log_probs(chosen, weight, mtp.targets, 1, temperature, chunk)
    hits = (likeliest.tokens[:, 0] == mtp.targets).to(log_probs.dtype)
    return MTPScores(log_probs * mtp.valid, hits * mtp.valid)


def _positions(inputs: ModelInputs) -> Tensor:
    """Return the positions of the tokens, i64[axes, rows, tokens]: 3 axes, or 4 whose first one counts tokens."""
    positions: Tensor = inputs.position_ids
    if inputs.context is not None:
        positions = positions.unsqueeze(-2)
    return positions.expand(3, -1, -1) if positions.ndim == 2 else positions


def _masks(decoder: Any, hidden: Tensor, inputs: ModelInputs, positions: Tensor) -> dict[str, Any]:
    """Return the arguments that tell a decoder layer which tokens see one another."""
    if inputs.context is not None:
        return {"attention_mask": no_mask(inputs.input_ids), CONTEXT_KEY: inputs.context}
    mask = create_causal_mask(
        config=decoder.config,
        inputs_embeds=hidden,
        attention_mask=inputs.attention_mask,
        past_key_values=None,
        position_ids=positions[0],
    )
    return {"attention_mask": mask}


def collected_mtp(builder: InputBuilder, inputs: ModelInputs, scores: MTPScores | None) -> MTPScores | None:
    """Return the scores of a micro-batch's tokens, f32[T] each, from those that a rank computed; None of none."""
    if scores is None or inputs.mtp is None:
        return None
    placed = replace(inputs, slots=inputs.mtp.slots)
    return MTPScores(*(builder.collect(one, placed) for one in scores))

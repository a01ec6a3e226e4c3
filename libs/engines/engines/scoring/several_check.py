"""The check of several tokens that are to be scored at each of a batch's, before a step."""

from typing import Any

import torch

from engines.execution.executor import Scoring
from seqpack.batches.jagged import flattened
from seqpack.batches.view import BatchView


def check_several(view: BatchView, scoring: Scoring, model: Any) -> None:
    """Raise ValueError unless the column of tokens that is asked for is i64 (K, tokens), of distinct ones or -1."""
    if scoring.tokens is None and not scoring.top_k:
        return
    vocabulary = model.config.get_text_config().vocab_size
    if not 0 <= scoring.top_k <= vocabulary:
        raise ValueError(f"{scoring.top_k} likeliest tokens are asked for, the model has {vocabulary}")
    if scoring.tokens is None:
        return
    if scoring.top_k:
        raise ValueError(f"scores of the tokens {scoring.tokens} and of the likeliest {scoring.top_k}: ask for one")
    tokens = flattened(view.parts(scoring.tokens))
    if tokens.dtype != torch.int64 or tokens.dim() != 2 or view.parts(scoring.tokens).dim != 1:
        raise ValueError(f"{scoring.tokens} must be int64 (K, tokens), got {tokens.dtype} {tuple(tokens.shape)}")
    wrong = (tokens < -1) | (tokens >= vocabulary)
    if wrong.any():
        raise ValueError(
            f"{scoring.tokens} holds the token {int(tokens[wrong][0])}, the model's are 0 to {vocabulary - 1} (-1: "
            "none): was it made with another model's tokenizer?"
        )
    order = tokens.sort(dim=0).values
    if ((order[1:] == order[:-1]) & (order[1:] >= 0)).any():
        raise ValueError(f"{scoring.tokens} holds one token twice in a place: it would count twice")

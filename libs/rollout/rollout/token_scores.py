"""Scores of given tokens, by a teacher: of each itself, of the K likeliest at its place, and of all others together."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.engine import Sampling, check_request

CHUNK = 1024
"""Tokens whose logits are in memory at once."""
RESOLUTION = 1e-6
"""The least that float32 log-probs let the others have: what K of them lack of 1 is rounding below it."""


@dataclass(frozen=True, eq=False)
class TokenScores:
    """The log-probs at temperature 1 of n tokens, each conditioned on those before it, as a batch's keys have them.

    `log_probs` f32[n] of the tokens themselves; `top_tokens` i64[K, n] the likeliest at their places, in order,
    `top_log_probs` f32[K, n] theirs, and `rest` f32[n] that of all others together (-inf where they have none). The
    first token has none: 0 and -1.
    """

    log_probs: Tensor
    top_tokens: Tensor
    top_log_probs: Tensor
    rest: Tensor

    @classmethod
    def empty(cls, n: int, k: int) -> "TokenScores":
        """Return zeros, to be filled from the second token on."""
        zeros = (torch.zeros(n), torch.full((k, n), -1), torch.zeros(k, n), torch.zeros(n))
        return cls(*zeros)


def check_scored(ids: Sequence[int], k: int, vocab_size: int | None, max_length: int) -> None:
    """Raise ValueError for tokens that a model can't score: as `check_request`, or no number of its vocabulary."""
    check_request(ids, Sampling(max_new_tokens=1), vocab_size, max_length + 1)
    if not 0 <= k <= (vocab_size or k):
        raise ValueError(
            f"k counts the likeliest tokens at each place, from 0 to the vocabulary's {vocab_size}: got {k}"
        )


def scores_of(ids: Sequence[int], k: int, logits: Iterable[Tensor]) -> TokenScores:
    """Score tokens by the logits [m, V] after each of them but the last, a chunk at a time."""
    scores, at = TokenScores.empty(len(ids), k), 1
    for part in logits:
        table = part.to(torch.promote_types(part.dtype, torch.float32)).log_softmax(-1)
        here = slice(at, at + len(table))
        best = table.topk(k)
        scores.log_probs[here] = table.gather(1, torch.tensor(ids[here], device=table.device)[:, None])[:, 0]
        scores.top_tokens[:, here], scores.top_log_probs[:, here] = best.indices.t(), best.values.t()
        scores.rest[here] = table.scatter(1, best.indices, -torch.inf).logsumexp(-1)
        at += len(table)
    return scores


def scores_of_rows(
    ids: Sequence[int], k: int, rows: Sequence[Mapping[int, float] | None], vocab_size: int | None = None
) -> TokenScores:
    """Score tokens by what vLLM returns as `prompt_logprobs`: log-probs by token at each place, its own among them.

    What all others have is what the K lack of 1, and at least `RESOLUTION`, as what is below it is rounding: a
    probability of 0, where it is only small, would cost a policy that gives them some as if it could not be. Where the
    K are the whole vocabulary (`vocab_size`), others have none.

    Raises:
        ValueError: it returned fewer.
    """
    scores = TokenScores.empty(len(ids), k)
    for place, row in enumerate(rows[1:], start=1):
        best = sorted((row or {}).items(), key=lambda entry: -entry[1])[:k]
        if len(best) < k or row is None or ids[place] not in row or len(rows) != len(ids):
            raise ValueError(
                f"the server does not return {k} log-probs at each token: start vLLM with --max-logprobs -1"
            )
        scores.log_probs[place] = row[ids[place]]
        left = 1 - math.fsum(math.exp(log_prob) for _, log_prob in best)
        scores.rest[place] = -math.inf if k == vocab_size else math.log(max(left, RESOLUTION))
        if k:
            scores.top_tokens[:, place], scores.top_log_probs[:, place] = map(torch.tensor, zip(*best, strict=True))
    return scores

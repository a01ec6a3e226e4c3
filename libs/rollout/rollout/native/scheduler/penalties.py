"""Penalties of tokens that a request has read or sampled before, as vLLM defines them. A pure function on logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout.native.scheduler.request import SequenceRequest


def apply_penalties(logits: Tensor, requests: Sequence[SequenceRequest | None]) -> Tensor:
    """Return logits (n, V) with the penalties of each row's request (None: of nobody); float32 where there are any.

    The repetition penalty (Keskar et al., 2019) divides positive logits of the tokens of prompt and completion, and
    multiplies negative ones. Of a token of the completion, frequency_penalty is then subtracted once each time that it
    was sampled, and presence_penalty once. The time is that of reading the tokens so far.
    """
    rows = [(i, r) for i, r in enumerate(requests) if r is not None and r.sampling.penalizes]
    if not rows:
        return logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    where, factor = _entries(logits, [(i, (*r.prompt, *r.ids), r.sampling.repetition_penalty) for i, r in rows])
    before = logits[where]
    logits[where] = torch.where(before > 0, before / factor, before * factor)
    where, presence = _entries(logits, [(i, r.ids, r.sampling.presence_penalty) for i, r in rows])
    logits[where] = logits[where] - presence  # a token that comes twice is written twice, as the same number
    where, frequency = _entries(logits, [(i, r.ids, r.sampling.frequency_penalty) for i, r in rows])
    return logits.index_put_(where, -frequency, accumulate=True)


def _entries(logits: Tensor, rows: Sequence[tuple[int, Sequence[int], float]]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the places (row, token) of these rows' tokens, and the row's number at each."""
    device = logits.device
    lengths = torch.tensor([len(ids) for _, ids, _ in rows], device=device)
    tokens = torch.tensor([token for _, ids, _ in rows for token in ids], dtype=torch.int64, device=device)
    row = torch.tensor([i for i, _, _ in rows], device=device).repeat_interleave(lengths)
    number = torch.tensor([x for _, _, x in rows], dtype=logits.dtype, device=device).repeat_interleave(lengths)
    return (row, tokens), number

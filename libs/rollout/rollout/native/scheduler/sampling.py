"""From logits to tokens: temperature, min-p, top-k, top-p, inverse-CDF sampling. Pure functions on (n, V) logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.engine import Sampling


@dataclass(frozen=True)
class SamplingRows:
    """The settings of n requests as columns: one tensor a field, so that a mixed batch costs no loop.

    `temperature` and `min_p` (n, 1) float32; `top_k` (n, 1) int64 (0: off); `top_p` (n, 1) float32; `greedy` (n,) bool.
    A column that no row needs is None. `penalizes`: whether a row has penalties (`rollout.native.scheduler.penalties`);
    `structured`: whether one has structured outputs (`rollout.native.scheduler.grammars`).
    """

    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    greedy: Tensor | None
    all_greedy: bool
    min_p: Tensor | None = None
    penalizes: bool = False
    structured: bool = False

    @classmethod
    def build(cls, settings: Sequence[Sampling], device: torch.device) -> "SamplingRows":
        """Build the columns on `device` from one Sampling a row."""
        kinds = {id(s): s for s in settings}.values()  # many rows share one
        heated = any(s.temperature != 1 for s in kinds)
        filters = any(s.top_k or s.top_p < 1 for s in kinds)
        greedy = [s.greedy for s in settings]
        return cls(
            temperature=torch.tensor([[s.temperature] for s in settings], device=device) if heated else None,
            top_k=torch.tensor([[s.top_k] for s in settings], device=device) if filters else None,
            top_p=torch.tensor([[s.top_p] for s in settings], device=device) if filters else None,
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            all_greedy=all(greedy),
            min_p=torch.tensor([[s.min_p] for s in settings], device=device) if any(s.min_p for s in kinds) else None,
            penalizes=any(s.penalizes for s in kinds),
            structured=any(s.structured_outputs for s in kinds),
        )


def sampled_log_probs(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return log-probs (n, V), float32 (float64 of such logits), of what is sampled from; -inf: filtered."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if rows.temperature is not None:
        logits = logits / rows.temperature
    if rows.min_p is not None:
        least = logits.amax(dim=-1, keepdim=True) + rows.min_p.log()
        logits = logits.masked_fill(logits < least, -torch.inf)
    if rows.top_k is not None and rows.top_p is not None:
        logits = _filter(logits, rows.top_k, rows.top_p)
    return torch.log_softmax(logits, dim=-1)


def _filter(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the k likeliest tokens, then the shortest run of those whose (renormalised) probability reaches top_p."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
    probs = ordered.softmax(dim=-1)
    before = (
        probs.cumsum(dim=-1) - probs
    )  # probability of all likelier tokens: 0 for the first, which thus always stays
    ordered = ordered.masked_fill((top_p < 1) & (before >= top_p), -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def choose(logits: Tensor, rows: SamplingRows, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose tokens (n,) int64 and return them with their log-probs (n,) float32.

    `uniforms` (n, 1) float64 in [0, 1), one a row, are None where all rows are greedy. Inverse CDF: the first token
    whose cumulative probability exceeds the number, which is scaled to the CDF's last value so that a token of
    probability zero is never chosen.
    """
    log_probs = sampled_log_probs(logits, rows)
    if rows.all_greedy or uniforms is None:
        tokens = log_probs.argmax(dim=-1, keepdim=True)
    else:
        cdf = log_probs.exp().double().cumsum_(dim=-1)
        tokens = torch.searchsorted(cdf, uniforms * cdf[:, -1:], right=True)
        tokens = tokens.clamp_(max=logits.shape[-1] - 1)  # NaN logits only: the caller refuses them by their log-prob
        if rows.greedy is not None:
            tokens = torch.where(rows.greedy[:, None], log_probs.argmax(dim=-1, keepdim=True), tokens)
    return tokens.squeeze(-1), log_probs.gather(-1, tokens).squeeze(-1)

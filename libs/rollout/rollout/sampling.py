"""From logits to tokens: temperature, top-k, top-p, inverse-CDF sampling. Pure functions on (n, V) logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.engine import Sampling


@dataclass(frozen=True)
class SamplingRows:
    """The settings of n requests as columns: one tensor a field, so that a mixed batch costs no loop.

    `uniforms` is (n, max_new_tokens) float64 in [0, 1): one number for each token to come, drawn beforehand.
    `temperature` (n, 1) float32; `top_k` (n, 1) int64 (0: off); `top_p` (n, 1) float32; `greedy` (n,) bool.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    greedy: Tensor
    uniforms: Tensor
    plain: bool  # every row: temperature 1, no filter
    any_filter: bool
    any_greedy: bool
    all_greedy: bool

    @classmethod
    def build(cls, settings: Sequence[Sampling], uniforms: Tensor, device: torch.device) -> "SamplingRows":
        """Columns on `device` from one Sampling a row."""
        filters = any(s.top_k or s.top_p < 1 for s in settings)
        greedy = [s.greedy for s in settings]
        return cls(
            temperature=torch.tensor([[s.temperature] for s in settings], device=device),
            top_k=torch.tensor([[s.top_k] for s in settings], device=device),
            top_p=torch.tensor([[s.top_p] for s in settings], device=device),
            greedy=torch.tensor(greedy, device=device),
            uniforms=uniforms.to(device),
            plain=not filters and all(s.temperature == 1 for s in settings),
            any_filter=filters,
            any_greedy=any(greedy),
            all_greedy=all(greedy),
        )

    def select(self, rows: Tensor) -> "SamplingRows":
        """The given rows alone."""
        return SamplingRows(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.greedy[rows],
            self.uniforms[rows],
            self.plain,
            self.any_filter,
            self.any_greedy,
            self.all_greedy,
        )


def draw_uniforms(settings: Sequence[Sampling], generator: torch.Generator) -> Tensor:
    """One number in [0, 1) for each token that each request may sample: (n, max of max_new_tokens) float64, on the CPU.

    A request with a seed gets the stream of that seed alone, so its tokens do not depend on its neighbours.
    """
    width = max(s.max_new_tokens for s in settings)
    uniforms = torch.rand(len(settings), width, dtype=torch.float64, generator=generator)
    for row, s in enumerate(settings):
        if s.seed is not None:
            own = torch.Generator().manual_seed(s.seed)
            uniforms[row, : s.max_new_tokens] = torch.rand(s.max_new_tokens, dtype=torch.float64, generator=own)
    return uniforms


def sampled_log_probs(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Log-probs (n, V) float32 of the distribution that is sampled from; -inf where a filter took a token out."""
    logits = logits.float()
    if rows.plain:
        return torch.log_softmax(logits, dim=-1)
    logits = logits / rows.temperature
    if rows.any_filter:
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


def choose(logits: Tensor, rows: SamplingRows, step: int) -> tuple[Tensor, Tensor]:
    """Tokens (n,) int64 and their log-probabilities (n,) float32, by the `step`-th uniform number of each row.

    Inverse CDF: the first token whose cumulative probability exceeds the number. Dividing by the last value makes the
    CDF end at exactly 1, so a token of probability zero is never chosen.
    """
    log_probs = sampled_log_probs(logits, rows)
    if rows.all_greedy:
        tokens = log_probs.argmax(dim=-1)
    else:
        cdf = log_probs.double().exp().cumsum(dim=-1)
        cdf = cdf / cdf[:, -1:]
        tokens = torch.searchsorted(cdf, rows.uniforms[:, step : step + 1].contiguous(), right=True).squeeze(-1)
        tokens = tokens.clamp_(max=logits.shape[-1] - 1)  # NaN logits only: the caller refuses them by their log-prob
        if rows.any_greedy:
            tokens = torch.where(rows.greedy, log_probs.argmax(dim=-1), tokens)
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)

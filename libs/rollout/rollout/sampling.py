"""Sampling of tokens: the settings of a request, which import no torch."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens. The fields act in this order: temperature, then top-k, then top-p.

    `top_k=0` and `top_p=1.0` leave the distribution whole. `greedy` takes the likeliest token and uses no randomness.
    With a `seed`, a request draws the same numbers whatever else is in the batch; without one it draws from the
    engine's own generator.
    """

    temperature: float = 1.0
    """Divisor of the logits: below 1 the likelier tokens are sampled more often."""
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 128
    """Longest response, of one turn, in tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, beside the model's own."""
    seed: int | None = None
    greedy: bool = False

    def __post_init__(self) -> None:
        if problems := [*self.problems()]:
            raise ValueError("; ".join(problems))

    def problems(self) -> Iterator[str]:
        """Yield a text for each invalid field, beginning with the field's name."""
        if not 0 < self.temperature < float("inf"):
            yield (
                f"temperature must be above 0 and finite, got {self.temperature}; "
                "for the likeliest token say greedy=True"
            )
        if self.top_k < 0:
            yield f"top_k must be 0 (off) or a count of tokens, got {self.top_k}"
        if not 0 < self.top_p <= 1:
            yield f"top_p must lie in (0, 1], got {self.top_p}"
        if self.max_new_tokens < 1:
            yield f"max_new_tokens must be at least 1, got {self.max_new_tokens}"
        if self.greedy and (self.temperature != 1 or self.top_k or self.top_p != 1 or self.seed is not None):
            yield "greedy ignores temperature, top_k, top_p and seed; leave them at their defaults"

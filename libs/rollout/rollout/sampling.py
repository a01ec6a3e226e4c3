"""Sampling of tokens: the settings of a request, which import no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rollout.structured_outputs import StructuredOutputs


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens. The fields act in vLLM's order: structured outputs, penalties, temperature, min-p, top-k,
    then top-p.

    `min_p=0`, `top_k=0` and `top_p=1.0` leave the distribution whole. `greedy` takes the likeliest token and uses no
    randomness.
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
    min_p: float = 0.0
    """Least probability of a token, as a share of the likeliest one's."""
    presence_penalty: float = 0.0
    """Subtrahend of the logits of tokens that the completion has."""
    frequency_penalty: float = 0.0
    """Subtrahend of the logit of a token for each time that the completion has it."""
    repetition_penalty: float = 1.0
    """Divisor of the positive logits, and factor of the negative ones, of tokens in prompt and completion."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, each with the token that completes it; in conversations, not in engines."""
    structured_outputs: StructuredOutputs = StructuredOutputs()  # noqa: RUF009  frozen
    """What the completion has to be: an instance of a JSON schema, a match of an expression, ..."""

    @property
    def penalizes(self) -> bool:
        """The penalties: whether any has an effect."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def is_whole(self) -> bool:
        """The distribution: whether it is the model's own, or the likeliest token of it."""
        filtered = self.temperature != 1 or self.top_k or self.top_p != 1 or self.min_p
        return not (filtered or self.penalizes or self.structured_outputs)

    def after(self, count: int) -> "Sampling":
        """Return the settings of the rest of a completion, whose first `count` tokens are the end of its prompt now."""
        wanted = self.structured_outputs
        read = replace(wanted, num_read=wanted.num_read + count) if wanted else wanted
        return replace(self, max_new_tokens=self.max_new_tokens - count, structured_outputs=read)

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
        if not 0 <= self.min_p <= 1:
            yield f"min_p must lie in [0, 1], got {self.min_p}"
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                yield f"{name} must lie in [-2, 2], got {getattr(self, name)}"
        if not 0 < self.repetition_penalty < float("inf"):
            yield f"repetition_penalty must be above 0 and finite, got {self.repetition_penalty}; 1 is none"
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            yield f"stop is a tuple of texts, none of them empty, got {self.stop!r}"
        if self.stop and self.structured_outputs:
            yield "stop would end a structured output before it is whole: leave stop or structured_outputs out"
        drawn = self.temperature != 1 or self.top_k or self.top_p != 1 or self.min_p or self.seed is not None
        if self.greedy and drawn:
            yield "greedy ignores temperature, min_p, top_k, top_p and seed; leave them at their defaults"

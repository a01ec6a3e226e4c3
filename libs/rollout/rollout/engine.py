"""What every generation engine promises: the request, the answer and the protocol between them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from rollout.sync import Piece

StopReason = Literal["stop", "length", "abort"]
PauseMode = Literal["finish", "abort"]


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens. The fields act in this order: temperature, then top-k, then top-p.

    `top_k=0` and `top_p=1.0` leave the distribution whole. `greedy` takes the likeliest token and uses no randomness.
    With a `seed`, a request draws the same numbers whatever else is in the batch; without one it draws from the
    engine's own generator.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    greedy: bool = False

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature must be above 0, got {self.temperature}; for the likeliest token say greedy=True"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or a count of tokens, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.greedy and (self.temperature != 1 or self.top_k or self.top_p != 1 or self.seed is not None):
            raise ValueError("greedy ignores temperature, top_k, top_p and seed; leave them at their defaults")


@dataclass(frozen=True)
class Completion:
    """The tokens sampled after one prompt; all four fields speak of the same tokens, in order.

    `ids` include the stop token that ended them. `log_probs` are those of the distribution that was sampled from:
    at the temperature used and renormalised over what top-k and top-p left (for greedy: the model's own, at
    temperature 1). `policy_versions` name, token by token, the weights that made it.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    stop_reason: StopReason
    policy_versions: tuple[int, ...]


@runtime_checkable
class RolloutEngine(Protocol):
    """A generator of tokens whose weights can be replaced while it lives."""

    @property
    def version(self) -> int:
        """The number of the weights in use."""
        ...

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, media: Mapping[str, Any] | None = None
    ) -> Completion:
        """Sample one completion; concurrent calls are batched."""
        ...

    async def update_weights(self, version: int, pieces: Iterable[Piece]) -> None:
        """Replace all weights, or raise ValueError and keep all the old ones."""
        ...

    async def pause(self, mode: PauseMode = "finish") -> None:
        """Start no new work; return when the running work is finished (or aborted with what it has)."""
        ...

    async def resume(self) -> None:
        """Take up work again, first the requests that waited."""
        ...

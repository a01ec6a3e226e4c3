"""One request while it is sampled: its prompt, its random numbers, the tokens so far."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from rollout.engine import Completion, Sampling, StopReason
from rollout.experts import ROUTED_EXPERTS, RoutedExperts, merged

_BLOCK = 64


def uniforms_of(seed: int) -> Iterator[float]:
    """Yield numbers in [0, 1), float64, one a token: a stream for each seed, whatever else is in the batch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.rand(_BLOCK, dtype=torch.float64, generator=generator).tolist()


@dataclass(eq=False)
class SequenceRequest:
    """A prompt being continued. `answer` is called once, with the completion or with the error that ended it."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    answer: Callable[[Completion | BaseException], None]
    on_token: Callable[[int, float], None] | None = None
    """Function that gets every token and its log-prob when it is taken."""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    slot: int | None = None
    epoch: int = 0
    """Number of the weights that computed all of the slot's state."""
    done: bool = False
    experts: RoutedExperts | None = None
    """Experts of the tokens that were read, where they are recorded."""

    def __post_init__(self) -> None:
        self.uniforms = uniforms_of(self.seed)
        self._stops = frozenset(self.sampling.stop_token_ids)
        self._limit = self.sampling.max_new_tokens

    def take(self, token: int, log_prob: float, version: int) -> StopReason | None:
        """Append a token; return why it was the last, or None."""
        self.ids.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        if self.on_token is not None:
            self.on_token(token, log_prob)
        if token in self._stops:
            return "stop"
        return "length" if len(self.ids) == self._limit else None

    def note(self, experts: RoutedExperts | None) -> None:
        """Add the experts of tokens for which there are none yet."""
        self.experts = merged(self.experts, experts)

    def finish(self, outcome: StopReason | BaseException) -> None:
        """Call `answer` with the tokens so far, or with an error."""
        assert not self.done
        self.done = True
        if isinstance(outcome, BaseException):
            self.answer(outcome)
        else:
            extras = {}
            if self.experts is not None:
                extras[ROUTED_EXPERTS] = self.experts.resized(len(self.prompt) + len(self.ids))
            self.answer(Completion(tuple(self.ids), tuple(self.log_probs), outcome, tuple(self.versions), extras))

"""One request while it is sampled: its prompt, its random numbers, the tokens so far."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import TYPE_CHECKING

import torch

from rollout.engine import Completion, Sampling, StopReason
from rollout.experts import ROUTED_EXPERTS, RoutedExperts, merged

if TYPE_CHECKING:  # optional
    import llguidance

_BLOCK = 64


class _Scratch(threading.local):
    """A generator and the blocks that it fills, by length, used again for each stream that one block is enough for."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.blocks = [torch.empty(count, dtype=torch.float64) for count in range(_BLOCK + 1)]


_SCRATCH = _Scratch()


def uniforms_of(seed: int, count: int | None = None) -> Iterator[float]:
    """Return numbers in [0, 1), float64, one a token: a stream for each seed, whatever else is in the batch.

    It goes on for ever, or for `count` numbers at least. Nothing is drawn before the first is taken.
    """
    return chain.from_iterable(_blocks_of(seed, count))


def _blocks_of(seed: int, count: int | None) -> Iterator[list[float]]:
    """Yield the stream in blocks, which cost a step less than numbers one by one."""
    if count is not None and count <= _BLOCK:
        yield _SCRATCH.blocks[count].uniform_(generator=_SCRATCH.generator.manual_seed(seed)).tolist()
        return
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.rand(_BLOCK, dtype=torch.float64, generator=generator).tolist()


def seeds_of(settings: Sequence[Sampling], generator: torch.Generator) -> list[int]:
    """Return the seed of each request, drawn where its sampling has none; 0 for greedy ones, which draw nothing."""
    count = sum(s.seed is None and not s.greedy for s in settings)
    drawn = iter(torch.randint(2**63 - 1, (count,), generator=generator).tolist() if count else ())
    return [0 if s.greedy else next(drawn) if s.seed is None else s.seed for s in settings]


@dataclass(eq=False)
class SequenceRequest:
    """A prompt being continued. `answer` is called once, with the completion or with the error that ended it."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    answer: Callable[[Completion | BaseException], None]
    on_token: Callable[[int, float], None] | None = None
    """Function that gets every token and its log-prob when it is taken."""
    matcher: "llguidance.LLMatcher | None" = None
    """State of its grammar after the tokens so far; None: any token may come."""
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
        limit = self.sampling.max_new_tokens
        self.uniforms = repeat(0.0) if self.sampling.greedy else uniforms_of(self.seed, limit)
        self._stops = frozenset(self.sampling.stop_token_ids)
        self._limit = limit

    def take(self, token: int, log_prob: float, version: int) -> StopReason | None:
        """Append a token; return why it was the last, or None."""
        self.ids.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        if self.on_token is not None:
            self.on_token(token, log_prob)
        if token in self._stops:
            return "stop"
        if self.matcher is not None:
            self.matcher.consume_token(token)
        return "length" if len(self.ids) == self._limit else None

    def note(self, experts: RoutedExperts | None) -> None:
        """Add the experts of tokens for which there are none yet."""
        if experts is not None:
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

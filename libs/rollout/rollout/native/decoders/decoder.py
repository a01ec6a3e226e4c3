"""What continuous batching asks of a model: prompts in, rows in slots, one token a row and step."""

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from rollout.experts import RoutedExperts

Cache = TypeVar("Cache")


class Past(NamedTuple, Generic[Cache]):
    """The state after a row's tokens: its place in a cache."""

    cache: Cache
    pick: int


class Decoder(Protocol, Generic[Cache]):
    """Caches of rows in slots 0, 1, 2, ...; the caller says which are in use. Everything runs without gradients.

    A slot that was released may be stepped along with the others; the next `place` overwrites it.
    """

    vocab_size: int
    device: torch.device

    def refresh(self, always: bool = False) -> bool:
        """Take note that the module's weights may have changed, and tell whether they have. Slots and caches stay as
        they are. `always`: they have, whatever they look like (an optimizer's kernels write without torch's notice).
        """
        ...

    def prefill(
        self, prompts: Sequence[Sequence[int]], pasts: Sequence[Past[Cache]] | None = None
    ) -> tuple[Tensor, Cache]:
        """Read prompts, none of them empty: the logits [m, V] after each, and what `place` copies.

        With `pasts`, one each, prompts[i] are the tokens that follow those of pasts[i], and the cache is of both.
        """
        ...

    def keep(self, slots: Sequence[int]) -> Cache:
        """Return a cache of rows as they are now, in the order of `slots`, none of them released."""
        ...

    def size(self, lengths: Sequence[int]) -> int:
        """Return the memory of a cache of rows of these lengths, in tokens: state of fixed size counts as the tokens
        whose keys and values would take as much."""
        ...

    def experts(self, pick: int, cache: Cache | None = None) -> RoutedExperts | None:
        """Return the experts that the tokens of row `pick` of a cache went to, or of those in slot `pick`; None where
        they are not noted."""
        ...

    def place(self, cache: Cache, picks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy prompt picks[i] of a prefill into slot slots[i], for every i."""
        ...

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots; no slot is both a source and a target."""
        ...

    def release(self, slot: int) -> None:
        """Take note that nobody uses a slot any more."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token to each of the slots 0 .. n - 1 (tokens [n] int64): the logits [n, V] after it."""
        ...

    def clear(self) -> None:
        """Forget every slot and give its memory back."""
        ...

"""The protocol between continuous batching and a model: prompts in, rows in slots, one token a row and step."""

from collections.abc import Iterator, Sequence
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
    """Caches of rows in slots 0, 1, 2, ...; the caller tracks which are in use. Everything runs without gradients.

    A slot that was released may be stepped along with the others; the next `place` overwrites it.
    """

    vocab_size: int
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """The bytes of one token of `size`."""
        ...

    def slot_bytes(self, rows: int, length: int) -> int:
        """Return the bytes of slots of so many rows of so many tokens at most, with what is copied while they grow."""
        ...

    def reserve(self, rows: int, length: int) -> None:
        """Bound the slots to so many rows of so many tokens from here on; where they take more they are cut. All rows
        in use, and their tokens, lie within the bound."""
        ...

    def refresh(self, always: bool = False) -> bool:
        """Return whether the module's weights have changed. Slots and caches stay as they are. `always`: the caller
        knows that they have (an optimizer's kernels write without torch's notice)."""
        ...

    def prefill(
        self, prompts: Sequence[Sequence[int]], pasts: Sequence[Past[Cache]] | None = None
    ) -> tuple[Tensor, Cache]:
        """Read prompts, none of them empty; return the logits [m, V] after each, and the cache for `place`.

        With `pasts`, one each, prompts[i] are the tokens that follow those of pasts[i], and the cache is of both.
        """
        ...

    def score(self, ids: Sequence[int], chunk: int) -> Iterator[Tensor]:
        """Yield the logits [m, V] after each of the tokens, at most `chunk` of them at a time."""
        ...

    def keep(self, slots: Sequence[int]) -> Cache:
        """Return a cache of the present rows in `slots`, in this order, none of them released."""
        ...

    def size(self, lengths: Sequence[int]) -> int:
        """Return the memory of a cache of rows of these lengths, in tokens. State of fixed size counts as the tokens
        whose keys and values would take as much."""
        ...

    def experts(self, pick: int, cache: Cache | None = None) -> RoutedExperts | None:
        """Return the experts of the tokens in row `pick` of a cache, or in slot `pick`; None if not recorded."""
        ...

    def place(self, cache: Cache, picks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy prompt picks[i] of a prefill into slot slots[i], for every i."""
        ...

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots; no slot is both a source and a target."""
        ...

    def release(self, slot: int) -> None:
        """Release a slot that is not in use any more."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token to each of the slots 0 .. n - 1 (tokens [n] int64); return the logits [n, V] after it."""
        ...

    def clear(self) -> None:
        """Drop every slot and free its memory."""
        ...

"""The entries of a store that can be trained on, by their lengths; tokens of the chosen samples are read when asked
for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
import torch
from torch import Tensor

from apps.sft.reading.columns import Truncation as Truncation
from apps.sft.reading.samples import Sample, media_of
from apps.sft.reading.store import Store
from rollout.chat.images import ImageProcessor

BAD_ROW = "can't be used (--bad-rows skip)"


@dataclass(frozen=True, slots=True)
class Usable:
    """The entries of a store that can be trained on, side by side, and the rows of the others by reason.

    `cut`: how many of the usable ones are longer than what is read of them.
    """

    store: Store
    max_tokens: int
    truncation: Truncation
    entries: np.ndarray
    keys: list[str]
    rows: list[int]
    left_out: list[tuple[str, list[int]]]
    cut: int


def usable_of(store: Store, max_tokens: int, truncation: Truncation) -> Usable:
    """Return the usable entries of a store. Of a row that is cut, some trained token must be left."""
    reasons = {**store.reasons, **dict.fromkeys(store.problems, BAD_ROW)}
    trained, long = store.trained.copy(), np.flatnonzero(store.lengths > max_tokens)
    for number in map(int, long):
        if truncation == "skip":
            reasons[number] = f"longer than --max-tokens {max_tokens}"
        elif store.shown[number]:
            reasons[number] = f"longer than --max-tokens {max_tokens}, with images, which are not cut"
        else:
            trained[number] = cut(store.tokens(number), max_tokens, truncation)[1].sum()
    for number in map(int, np.flatnonzero(trained == 0)):
        reasons.setdefault(number, "nothing of the assistant's to train on")
    entries = np.array([i for i in range(len(store)) if i not in reasons], dtype=np.int64)
    left_out: dict[str, list[int]] = {}
    for number in sorted(reasons):
        left_out.setdefault(reasons[number], []).append(int(store.rows[number]))
    return Usable(
        store,
        max_tokens,
        truncation,
        entries,
        [store.key(int(i)) for i in entries],
        [int(row) for row in store.rows[entries]],
        list(left_out.items()),
        0 if truncation == "skip" else int(np.isin(long, entries).sum()),
    )


def cut(columns: tuple[np.ndarray, ...], max_tokens: int, truncation: Truncation) -> tuple[np.ndarray, ...]:
    """Return at most max_tokens of a row's tokens, mask, ...; the first is not trained, as nothing comes before it."""
    part = slice(-max_tokens, None) if truncation == "left" else slice(None, max_tokens)
    ids, mask, *others = (column[part].copy() for column in columns)
    mask[:1] = False
    return ids, mask, *others


@dataclass(frozen=True)
class Samples(Sequence[Sample]):
    """Chosen entries of some stores, in order, tokens read from disk each time. Pickled without any token."""

    files: tuple[tuple[Store, int, Truncation], ...]
    places: np.ndarray
    """i64[n, 2]: the file of each sample, and its entry there."""
    image_processor: ImageProcessor | None = None
    """How images are read, where the model sees: then every sample has their entries, also one of text."""

    @staticmethod
    def of(files: Sequence[Usable], chosen: Sequence[int], image_processor: ImageProcessor | None = None) -> "Samples":
        """Return the samples at `chosen` of all usable entries of all files, numbered through."""
        every = [np.stack([np.full(len(file.entries), n), file.entries], axis=1) for n, file in enumerate(files)]
        stores = tuple((file.store, file.max_tokens, file.truncation) for file in files)
        return Samples(stores, np.concatenate(every)[np.asarray(chosen, dtype=np.int64)], image_processor)

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> "Samples": ...
    def __getitem__(self, index: int | slice) -> "Sample | Samples":
        if isinstance(index, slice):
            return Samples(self.files, self.places[index], self.image_processor)
        sample = self.text(index)
        if self.image_processor is None:
            return sample
        return {**sample, **self._media(index, len(sample["input_ids"]))}

    def text(self, index: int) -> Sample:
        """Return a sample without its images."""
        file, entry = (int(part) for part in self.places[index])
        store, max_tokens, truncation = self.files[file]
        columns: tuple[np.ndarray, ...] = store.tokens(entry)
        if self._weighted:
            columns = (*columns, store.weights(entry))
        names = ("input_ids", "loss_mask", "loss_weights")
        sample = {
            name: torch.from_numpy(column)
            for name, column in zip(names, cut(columns, max_tokens, truncation), strict=False)
        }
        sample["position_ids"] = torch.arange(len(sample["input_ids"]))
        return sample

    @cached_property
    def _weighted(self) -> bool:
        """Whether a row has weights of its own: then all samples have a column of them."""
        return any(store.weighted for store, _, _ in self.files)

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Begin to read the images of samples that will be asked for, where the reader can (`CachedReader`)."""
        ahead = getattr(self.image_processor and self.image_processor.read, "ahead", None)
        if ahead is not None:
            for file, entry in self.places[np.asarray(indices, dtype=np.int64)].tolist():
                ahead(self.files[file][0].images(entry)[1])

    def _media(self, index: int, length: int) -> dict[str, Tensor]:
        assert self.image_processor is not None
        file, entry = (int(part) for part in self.places[index])
        store = self.files[file][0]
        types, images = store.images(entry)
        try:
            return media_of(types if images else [0] * length, images, self.image_processor)
        except ValueError as error:
            raise ValueError(f"row {store.rows[entry]} of the file tokenised in {store.path.name}: {error}") from error

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        """The tokens read of each sample, i64[n]."""
        lengths = np.zeros(len(self), dtype=np.int64)
        for number, (store, most, _) in enumerate(self.files):
            own = self.places[:, 0] == number
            lengths[own] = np.minimum(store.lengths[self.places[own, 1]], most)
        return lengths

"""Tokenised rows on disk: an Arrow file that is written once and then mapped into memory, read a row at a time.

Written in batches of so many rows or bytes, whichever come first, so that rows with images take no more memory than
others. A row of the file that could not be used has its reason in place of tokens, so that every row is accounted for.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from apps.sft.reading.samples import Encoded

T = TypeVar("T")
NO_KEY = "00" * 16
"""The key of a row that can't be used."""
ROWS_A_BATCH = 1024
BYTES_A_BATCH = 16 * 2**20
SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("key", pa.binary(16)),
        ("reason", pa.string()),
        ("length", pa.int64()),
        ("trained", pa.int64()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("loss_weights", pa.list_(pa.float32())),
        ("types", pa.list_(pa.int8())),
        ("images", pa.list_(pa.large_string())),
        ("stamps", pa.list_(pa.string())),
        ("problem", pa.string()),
        ("unread", pa.list_(pa.string())),
    ]
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One row: its number in the file (from 1), the digest of its content, and its tokens or why it has none."""

    row: int
    key: str
    encoded: Encoded | None
    reason: str | None = None
    stamps: tuple[str, ...] = ()
    """Of each image, which bytes its tokens were made from (`stamp_of`)."""
    problem: str | None = None
    """Why the row can't be used, where it can't: `bad_rows` says what becomes of it."""
    unread: tuple[str, ...] = ()
    """Keys of its messages that nothing reads."""

    @property
    def size(self) -> int:
        """The bytes that it takes in memory, about: a token is a Python number and its place in two lists."""
        return 0 if self.encoded is None else 48 * len(self.encoded.ids) + sum(map(len, self.encoded.images))


def stamp_of(image: str) -> str:
    """Return the size and modification time of an image's file, which identify it; "" for a `data:` URI.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if image.startswith("data:"):
        return ""
    facts = Path(image).stat()
    return f"{facts.st_size} {facts.st_mtime_ns}"


def in_parts(items: Iterable[T], count: int, size: int, size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in order, in lists that end at `count` items or `size` bytes."""
    part: list[T] = []
    total = 0
    for item in items:
        part.append(item)
        total += size_of(item)
        if len(part) == count or total >= size:
            yield part
            part, total = [], 0
    if part:
        yield part


def write_store(path: Path, entries: Iterable[Entry]) -> None:
    """Write all entries in order; see `write_batches`."""
    write_batches(path, batches_of(entries))


def batches_of(entries: Iterable[Entry]) -> Iterator[Any]:
    """Yield entries as record batches of so many rows or bytes."""
    return map(record_batch, in_parts(entries, ROWS_A_BATCH, BYTES_A_BATCH, lambda entry: entry.size))


def write_batches(path: Path, batches: Iterable[Any]) -> None:
    """Write record batches in order; the file appears whole or not at all, also where several processes write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.writing")
    try:
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
            for batch in batches:
                writer.write_batch(batch)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class Store:
    """The entries of a mapped file: only the pages that are read come into memory. Pickled by its path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[type["Store"], tuple[Path]]:
        return Store, (self.path,)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def rows(self) -> np.ndarray:
        """The number of each entry's row in its source, i64[n]."""
        return self._column("row")

    @cached_property
    def lengths(self) -> np.ndarray:
        """The tokens of each entry, i64[n]; 0 for an entry without."""
        return self._column("length")

    @cached_property
    def trained(self) -> np.ndarray:
        """The trained tokens of each entry, i64[n]; the first of a row never is, as nothing comes before it."""
        return self._column("trained")

    @cached_property
    def reasons(self) -> dict[int, str]:
        """The reasons why entries have no tokens, by their number."""
        return self._texts("reason")

    @cached_property
    def problems(self) -> dict[int, str]:
        """The problems of the entries whose rows can't be used, by their number."""
        return self._texts("problem")

    @cached_property
    def unread(self) -> dict[str, tuple[int, int]]:
        """The keys of messages that nothing reads: how many rows have each, and the place of the first."""
        counts: dict[str, tuple[int, int]] = {}
        column = self._table.column("unread")
        for i in map(int, np.flatnonzero(pc.list_value_length(column).to_numpy())):
            for key in column[i].as_py():
                count, first = counts.get(key, (0, int(self.rows[i])))
                counts[key] = (count + 1, first)
        return counts

    def key(self, number: int) -> str:
        """Return the digest of an entry's content."""
        result: str = self._cell("key", number).as_py().hex()
        return result

    def tokens(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return input_ids i64[T] and loss_mask bool[T] of an entry, as copies."""
        ids, mask = (self._cell(name, number).values for name in ("input_ids", "loss_mask"))
        return ids.to_numpy().astype(np.int64), mask.to_numpy(zero_copy_only=False)

    def weights(self, number: int) -> np.ndarray:
        """Return the weights of an entry's tokens, f32[T], as a copy; 1 for all where it has none of its own."""
        own = self._cell("loss_weights", number).values.to_numpy()
        return own.copy() if len(own) else np.ones(self.lengths[number], np.float32)

    @cached_property
    def weighted(self) -> bool:
        """Whether some entry has weights of its own."""
        return bool(self._counts("loss_weights").any())

    @cached_property
    def shown(self) -> np.ndarray:
        """The number of images of each entry, i64[n]."""
        return self._counts("images")

    def _counts(self, name: str) -> np.ndarray:
        return np.concatenate([pc.list_value_length(batch.column(name)).to_numpy() for batch in self._batches])

    def images(self, number: int) -> tuple[list[int], list[str]]:
        """Return a mask of the tokens that stand for images (1), and the images as paths or `data:` URIs."""
        types, images = (self._cell(name, number).as_py() for name in ("types", "images"))
        return types, images

    def stamps(self, number: int) -> list[str]:
        """Return the stamps of these images when they were tokenised, one each; see `stamp_of`."""
        stamps: list[str] = self._cell("stamps", number).as_py()
        return stamps

    @cached_property
    def _batches(self) -> list[Any]:
        with pa.memory_map(str(self.path)) as source:
            reader = pa.ipc.open_file(source)
            return [reader.get_batch(i) for i in range(reader.num_record_batches)]

    @cached_property
    def _ends(self) -> list[int]:
        """The number of entries up to the end of each batch."""
        return list(accumulate(batch.num_rows for batch in self._batches))

    def _cell(self, name: str, number: int) -> Any:
        batch = bisect_right(self._ends, number)
        first = self._ends[batch - 1] if batch else 0
        return self._batches[batch].column(name)[number - first]

    @property
    def _table(self) -> Any:
        return pa.Table.from_batches(self._batches, SCHEMA)

    def _texts(self, name: str) -> dict[int, str]:
        column = self._table.column(name)
        return {int(i): column[int(i)].as_py() for i in np.flatnonzero(column.is_valid().to_numpy())}

    def _column(self, name: str) -> np.ndarray:
        result: np.ndarray = self._table.column(name).to_numpy()
        return result


def record_batch(entries: list[Entry]) -> Any:
    """Return entries as a record batch of `SCHEMA`."""
    encoded = [entry.encoded or Encoded((), ()) for entry in entries]
    columns = [
        [entry.row for entry in entries],
        [bytes.fromhex(entry.key) for entry in entries],
        [entry.reason for entry in entries],
        [len(e.ids) for e in encoded],
        [sum(e.mask[1:]) for e in encoded],
        [e.ids for e in encoded],
        [e.mask for e in encoded],
        [e.weights for e in encoded],
        [e.types for e in encoded],
        [e.images for e in encoded],
        [entry.stamps for entry in entries],
        [entry.problem for entry in entries],
        [entry.unread for entry in entries],
    ]
    return pa.record_batch([pa.array(c, field.type) for c, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)

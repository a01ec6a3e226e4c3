"""Pictures read by threads ahead of their use, and once for all rows that show them."""

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from engines.media.image_reader import ImageReader

THREADS = 4
"""At most: decoding, resizing and numpy's arithmetic hold no interpreter lock."""
MAX_BYTES = 2**30
"""Bytes of patches that are kept, by default."""

_Read = Future[tuple[Tensor, Tensor]]


class CachedReader:
    """An `ImageReader` that keeps the patches of the pictures read last, up to `max_bytes`, and reads ahead."""

    def __init__(self, reader: ImageReader, max_bytes: int = MAX_BYTES) -> None:
        self.reader = reader
        self.max_bytes = max_bytes
        self._start()

    def _start(self) -> None:
        self._reads: OrderedDict[Any, _Read] = OrderedDict()
        self._under_way: list[Any] = []
        self._sizes: dict[Any, int] = {}
        self._held = 0  # bytes, the sum of the sizes
        self._pool: ThreadPoolExecutor | None = None
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process gets: no patches, no threads."""
        return {"reader": self.reader, "max_bytes": self.max_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin with nothing read."""
        vars(self).update(state)
        self._start()

    def __str__(self) -> str:
        """Return the settings; see `ImageReader`."""
        return str(self.reader)

    def __call__(self, images: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Read pictures; see `ImageReader`."""
        if not images:
            raise ValueError("there is no picture to read")
        parts = []
        for number, read in enumerate([self._ask(picture) for picture in images]):
            try:
                parts.append(read.result())
            except ValueError as error:
                raise ValueError(str(error).replace("picture 0", f"picture {number}", 1)) from error
        patches, grids = zip(*parts, strict=True)
        return (patches[0] if len(patches) == 1 else torch.cat(patches)), torch.cat(grids)

    def grids(self, images: Sequence[Any]) -> Tensor:
        """Return the grids of pictures by their headers; see `ImageReader`."""
        return self.reader.grids(images)

    def ahead(self, images: Sequence[Any]) -> None:
        """Begin to read pictures that will be asked for; one that cannot be read is told then."""
        for picture in images:
            self._ask(picture)

    def _ask(self, picture: Any) -> _Read:
        """Return a picture's read, begun now where it is not kept."""
        key = _key(picture)
        with self._lock:
            if key in self._reads:
                self._reads.move_to_end(key)
                return self._reads[key]
            if self._pool is None:
                self._pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "pictures")
            read = self._pool.submit(self.reader, [picture])
            if key is not None:
                self._reads[key] = read
                self._under_way.append(key)
                self._forget()
        return read

    def _forget(self) -> None:
        """Drop the reads that are longest unused until the rest fits; of those under way the size is not known."""
        ended = {key: self._reads[key] for key in self._under_way if self._reads[key].done()}
        self._under_way = [key for key in self._under_way if key not in ended]
        new = {key: read.result()[0].nbytes for key, read in ended.items() if read.exception() is None}
        self._sizes |= new
        self._held += sum(new.values())
        while self._held > self.max_bytes:
            oldest = next(key for key in self._reads if key in self._sizes)
            self._held -= self._sizes.pop(oldest)
            del self._reads[oldest]


def _key(picture: Any) -> Any:
    """Return what tells a picture from others, a file also by its size and time; None for one that is no value."""
    if isinstance(picture, Mapping):
        return _key(picture.get("bytes") or picture.get("path"))
    if isinstance(picture, str) and not picture.startswith("data:"):
        try:
            facts = os.stat(picture)
        except OSError:
            return None  # reading it says what is wrong
        return picture, facts.st_mtime_ns, facts.st_size
    return picture if isinstance(picture, str | bytes) else None

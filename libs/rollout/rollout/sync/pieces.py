"""Units of a weight sync: pieces of flattened tensors, buckets of pieces, checksums.

A training engine flattens each tensor and cuts it into pieces (`engines.WeightPiece`, or anything of the shape of
`Piece`); a receiver writes the pieces at their offsets. A piece of a `box` (`rollout.workers.shard_exchange`) has
the elements of that rectangle, row by row, and is written there. `buckets` joins many small pieces into few contiguous
buffers, for transports that are fast on large ones.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rollout.sync.boxes import Box


class Piece(Protocol):
    """A run of one tensor's elements: `flat` holds `offset .. offset + flat.numel()` of the flattened tensor."""

    @property
    def name(self) -> str:
        """Hugging Face parameter name."""
        ...

    @property
    def shape(self) -> Sequence[int]:
        """Shape of the whole tensor."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        ...

    @property
    def offset(self) -> int:
        """Index of the first element in the flattened tensor."""
        ...

    @property
    def flat(self) -> Tensor:
        """The elements, one dimension."""
        ...


class BucketPiece(NamedTuple):
    """A piece that was cut out of a bucket's buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    flat: Tensor
    box: Box | None = None


@dataclass(frozen=True)
class Header:
    """Where one piece lies in a bucket's buffer; `start` counts bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    numel: int
    start: int
    box: Box | None = None


@dataclass(frozen=True)
class Bucket:
    """Pieces laid end to end in one `uint8` buffer, each start aligned to 16 bytes."""

    headers: tuple[Header, ...]
    buffer: Tensor

    @property
    def nbytes(self) -> int:
        """The bytes of weights that a sampler gets by it."""
        return self.buffer.numel()

    def pieces(self) -> Iterator[BucketPiece]:
        """Yield the pieces again, as views of the buffer."""
        for h in self.headers:
            end = h.start + h.numel * h.dtype.itemsize
            yield BucketPiece(h.name, h.shape, h.dtype, h.offset, self.buffer[h.start : end].view(h.dtype), h.box)


def buckets(pieces: Iterable[Piece], max_bytes: int) -> Iterator[Bucket]:
    """Join pieces, in order, into buckets of at most `max_bytes`; a larger piece is a bucket of its own."""
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
    waiting: list[Piece] = []
    size = 0
    for piece in pieces:
        need = _aligned(piece.flat.numel() * piece.dtype.itemsize)
        if waiting and size + need > max_bytes:
            yield _join(waiting)
            waiting, size = [], 0
        waiting.append(piece)
        size += need
    if waiting:
        yield _join(waiting)


def box_of(piece: Piece) -> Box | None:
    """Return the box of a piece that has the elements of one."""
    return piece.box if isinstance(piece, BucketPiece) else None


def bucket_of(piece: Piece) -> Bucket:
    """Return one piece as a bucket that is a view of its memory, for a receiver in the same process."""
    shape, size = tuple(piece.shape), piece.flat.numel()
    header = Header(piece.name, shape, piece.dtype, piece.offset, size, 0, box_of(piece))
    return Bucket((header,), piece.flat.detach().contiguous().view(torch.uint8))


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / 16) * 16


def _join(pieces: list[Piece]) -> Bucket:
    headers: list[Header] = []
    start = 0
    for p in pieces:
        headers.append(Header(p.name, tuple(p.shape), p.dtype, p.offset, p.flat.numel(), start, box_of(p)))
        start += _aligned(p.flat.numel() * p.dtype.itemsize)
    buffer = torch.zeros(start, dtype=torch.uint8, device=pieces[0].flat.device)
    for h, p in zip(headers, pieces, strict=True):
        buffer[h.start : h.start + h.numel * h.dtype.itemsize] = p.flat.contiguous().view(torch.uint8)
    return Bucket(tuple(headers), buffer)


class Checksum:
    """A digest of names, shapes, types and bits, piece by piece.

    It depends neither on the order of the tensors nor on how they were cut, as long as each tensor's own pieces come in
    ascending order of offset.
    """

    def __init__(self) -> None:
        self._digests: dict[str, Any] = {}
        self._seen: dict[str, int] = {}

    def add(self, piece: Piece) -> None:
        """Add one piece. Raise ValueError where it is not the next one of its tensor."""
        name = piece.name
        if name not in self._digests:
            text = f"{name} {tuple(piece.shape)} {piece.dtype}"
            self._digests[name] = hashlib.blake2b(text.encode(), digest_size=16)
            self._seen[name] = 0
        if piece.offset != self._seen[name]:
            raise ValueError(
                f"{name}: a piece starts at element {piece.offset}, expected {self._seen[name]}; send them in order"
            )
        self._seen[name] += piece.flat.numel()
        data = piece.flat.detach().cpu().contiguous().view(torch.uint8)
        self._digests[name].update(data.numpy().tobytes())

    def digest(self) -> str:
        """Return the hex digest of all pieces so far."""
        whole = hashlib.blake2b(digest_size=16)
        for name in sorted(self._digests):
            whole.update(self._digests[name].digest())
        return whole.hexdigest()


def checksum(pieces: Iterable[Piece]) -> str:
    """Return the hex digest of a whole stream; see `Checksum`."""
    digest = Checksum()
    for piece in pieces:
        digest.add(piece)
    return digest.digest()

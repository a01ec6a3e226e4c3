"""Weight transfer, the receiving side: pieces assembled into whole tensors, buckets of pieces, checksums.

A training engine flattens each tensor and cuts it into pieces (`engines.WeightPiece`, or anything of the shape of
`Piece`); a receiver lays the pieces at their offsets. `buckets` joins many small pieces into few contiguous buffers,
for transports that are fast on large ones.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


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


@dataclass(frozen=True)
class Header:
    """Where one piece lies in a bucket's buffer; `start` counts bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    numel: int
    start: int


@dataclass(frozen=True)
class Bucket:
    """Pieces laid end to end in one `uint8` buffer, each start aligned to 16 bytes."""

    headers: tuple[Header, ...]
    buffer: Tensor

    def pieces(self) -> Iterator[BucketPiece]:
        """The pieces again, as views of the buffer."""
        for h in self.headers:
            end = h.start + h.numel * h.dtype.itemsize
            yield BucketPiece(h.name, h.shape, h.dtype, h.offset, self.buffer[h.start : end].view(h.dtype))


def buckets(pieces: Iterable[Piece], max_bytes: int) -> Iterator[Bucket]:
    """Join pieces, in order, into buckets of at most `max_bytes`; a larger piece has a bucket of its own."""
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
    held: list[Piece] = []
    size = 0
    for piece in pieces:
        need = _aligned(piece.flat.numel() * piece.dtype.itemsize)
        if held and size + need > max_bytes:
            yield _join(held)
            held, size = [], 0
        held.append(piece)
        size += need
    if held:
        yield _join(held)


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / 16) * 16


def _join(pieces: list[Piece]) -> Bucket:
    headers: list[Header] = []
    start = 0
    for p in pieces:
        headers.append(Header(p.name, tuple(p.shape), p.dtype, p.offset, p.flat.numel(), start))
        start += _aligned(p.flat.numel() * p.dtype.itemsize)
    buffer = torch.zeros(start, dtype=torch.uint8, device=pieces[0].flat.device)
    for h, p in zip(headers, pieces, strict=True):
        buffer[h.start : h.start + h.numel * h.dtype.itemsize] = p.flat.contiguous().view(torch.uint8)
    return Bucket(tuple(headers), buffer)


def checksum(pieces: Iterable[Piece]) -> str:
    """A hex digest of names, shapes, types and bits. It depends neither on the order of the tensors nor on how they
    were cut, as long as each tensor's own pieces come in ascending order of offset (ValueError otherwise).
    """
    digests: dict[str, Any] = {}
    seen: dict[str, int] = {}
    for p in pieces:
        if p.name not in digests:
            digests[p.name] = hashlib.blake2b(f"{p.name} {tuple(p.shape)} {p.dtype}".encode(), digest_size=16)
            seen[p.name] = 0
        if p.offset != seen[p.name]:
            raise ValueError(
                f"{p.name}: a piece starts at element {p.offset}, expected {seen[p.name]}; send them in order"
            )
        seen[p.name] += p.flat.numel()
        data = p.flat.detach().cpu().contiguous().view(torch.uint8)
        digests[p.name].update(data.numpy().tobytes())
    whole = hashlib.blake2b(digest_size=16)
    for name in sorted(digests):
        whole.update(digests[name].digest())
    return whole.hexdigest()


class WeightAssembler:
    """Collects pieces for a known set of tensors and hands them over whole, or says what is wrong.

    `targets` maps each accepted name to the tensor it will replace; `aliases` maps a name to the one it shares storage
    with (tied weights): either will do. `optional` names may be missing.
    """

    def __init__(
        self, targets: dict[str, Tensor], aliases: dict[str, str] | None = None, optional: Iterable[str] = ()
    ) -> None:
        self._targets = targets
        self._aliases = aliases or {}
        self._optional = frozenset(optional)
        self._staged: dict[str, Tensor] = {}
        self._filled: dict[str, list[tuple[int, int]]] = {}

    def add(self, piece: Piece) -> None:
        """Check one piece and keep a copy of it. ValueError: unknown name, wrong shape or type, out of bounds."""
        name = self._aliases.get(piece.name, piece.name)
        if name not in self._targets:
            raise ValueError(f"unknown weight {piece.name!r}: this model has no tensor of that name")
        target = self._targets[name]
        if tuple(piece.shape) != tuple(target.shape):
            raise ValueError(f"{piece.name}: shape {tuple(piece.shape)} does not fit the model's {tuple(target.shape)}")
        if piece.dtype.is_floating_point != target.dtype.is_floating_point or piece.flat.dtype != piece.dtype:
            raise ValueError(
                f"{piece.name}: {piece.flat.dtype} (said to be {piece.dtype}) cannot become {target.dtype}"
            )
        end = piece.offset + piece.flat.numel()
        if piece.offset < 0 or end > target.numel():
            raise ValueError(f"{piece.name}: elements {piece.offset}..{end} lie outside its {target.numel()}")
        if piece.name not in self._staged:
            self._staged[piece.name] = torch.empty(target.numel(), dtype=target.dtype, device=target.device)
            self._filled[piece.name] = []
        self._staged[piece.name][piece.offset : end].copy_(piece.flat)
        self._filled[piece.name].append((piece.offset, end))

    def finish(self) -> dict[str, Tensor]:
        """All tensors by name, in the targets' shapes. ValueError: something missing, overlapping or contradictory."""
        whole: dict[str, Tensor] = {}
        for given, flat in self._staged.items():
            at = 0
            for start, end in sorted(self._filled[given]):
                if start != at:
                    what = "twice" if start < at else "never"
                    raise ValueError(f"{given}: elements {min(start, at)}..{max(start, at)} arrived {what}")
                at = end
            if at != flat.numel():
                raise ValueError(f"{given}: elements {at}..{flat.numel()} never arrived")
            name = self._aliases.get(given, given)
            if name in whole and not torch.equal(whole[name].reshape(-1), flat):
                raise ValueError(f"{given} is tied to {name}, but the two arrived with different values")
            whole[name] = flat.view(self._targets[name].shape)
        missing = sorted(self._targets.keys() - whole.keys() - self._optional)
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ValueError(f"weights never arrived: {', '.join(missing[:3])}{more}")
        return whole


def assemble(assembler: WeightAssembler, pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """All tensors of a stream of pieces. The stream is read to its end before a ValueError about any piece is raised:
    it may be a collective export, in which the other ranks wait for this one.
    """
    problem: ValueError | None = None
    for piece in pieces:
        if problem is None:
            try:
                assembler.add(piece)
            except ValueError as error:
                problem = error
    if problem is not None:
        raise problem
    return assembler.finish()

"""The contents of a weight sync, sent before it begins."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from rollout.sync.adapter import Adapter
from rollout.sync.pieces import Checksum, Piece


class TensorSpec(NamedTuple):
    """A tensor's name, shape and type."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Manifest:
    """The new version, its tensors, and a checksum of all of them.

    Without `tensors` the sender promises the receiver's own, each under a name that the receiver knows (a trainer in
    the same process). Without a `checksum` (`rollout.sync.checksum` of the pieces) shapes, completeness and finite
    values are checked all the same. With an `adapter` only its low-rank pairs are sent, to a receiver that supports
    "adapters".
    """

    version: int
    tensors: tuple[TensorSpec, ...] | None = None
    checksum: str | None = None
    adapter: Adapter | None = None

    def __post_init__(self) -> None:
        if self.version < 0:
            raise ValueError(f"versions of weights count from 0, got {self.version}")
        names = [t.name for t in self.tensors or ()]
        if len(set(names)) < len(names):
            raise ValueError(f"a manifest names {next(n for n in names if names.count(n) > 1)!r} twice")


def manifest_of(version: int, pieces: Iterable[Piece]) -> Manifest:
    """Return the manifest of a stream of pieces, which is read to its end; the pieces themselves are sent later."""
    tensors: dict[str, TensorSpec] = {}
    digest = Checksum()
    for piece in pieces:
        tensors.setdefault(piece.name, TensorSpec(piece.name, tuple(piece.shape), piece.dtype))
        digest.add(piece)
    return Manifest(version, tuple(tensors.values()), digest.digest())

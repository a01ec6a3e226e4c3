"""The experts that read each token of a stream, so that a trainer can send it to the same ones.

"Stabilizing MoE reinforcement learning by aligning training and inference routers" (arXiv 2510.11370) replays them.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROUTED_EXPERTS = "routed_experts"
"""The key in a completion's extras and in a batch."""
UNKNOWN = -1
_BYTES = torch.int16.itemsize


@dataclass(frozen=True)
class RoutedExperts:
    """The experts of each token, i16[tokens, layers, k] as bytes, so that they can be compared, hashed and written.

    `layers` counts the layers that have a router, in the order of the model; `k` experts a token. A token whose experts
    are not known has -1 in all of its entries.
    """

    layers: int
    k: int
    data: bytes

    def __post_init__(self) -> None:
        if min(self.layers, self.k) < 1:
            raise ValueError(f"layers and k are at least 1, got {self.layers} and {self.k}")
        if len(self.data) % self._row:
            raise ValueError(f"{len(self.data)} bytes are no whole number of tokens of {self._row} bytes")

    @classmethod
    def of(cls, experts: Tensor) -> "RoutedExperts":
        """Copy a tensor [tokens, layers, k] of whole numbers. Raise ValueError for another shape, or beyond int16."""
        if experts.dim() != 3 or experts.is_floating_point():
            raise ValueError(
                f"experts are whole numbers [tokens, layers, k], got {experts.dtype} {tuple(experts.shape)}"
            )
        small = experts.to("cpu", torch.int16).contiguous()
        if experts.dtype != torch.int16 and not torch.equal(small.long(), experts.cpu().long()):
            raise ValueError("an expert's number is beyond 32767")
        return cls(experts.shape[1], experts.shape[2], small.numpy().tobytes())

    @property
    def _row(self) -> int:
        return self.layers * self.k * _BYTES

    def __len__(self) -> int:
        return len(self.data) // self._row

    def tensor(self) -> Tensor:
        """Return a copy as a tensor i16[tokens, layers, k]."""
        flat = torch.frombuffer(bytearray(self.data), dtype=torch.int16) if self.data else torch.zeros(0).short()
        return flat.view(-1, self.layers, self.k)

    def plain(self) -> list[Any]:
        """Return JSON values."""
        return [self.layers, self.k, base64.b64encode(self.data).decode()]

    @classmethod
    def read(cls, plain: Sequence[Any]) -> "RoutedExperts":
        """Read the result of `plain`."""
        layers, k, data = plain
        return cls(layers, k, base64.b64decode(data, validate=True))

    def resized(self, tokens: int) -> "RoutedExperts":
        """Return the experts of the first `tokens` tokens; those past the last known one are unknown."""
        if tokens == len(self):
            return self
        known = self.data[: tokens * self._row]
        lacking = tokens - len(known) // self._row
        return RoutedExperts(self.layers, self.k, known + b"\xff" * (lacking * self._row))

    def over(self, other: "RoutedExperts") -> "RoutedExperts":
        """Return these experts where known, else the other's of the same stream, at the length of the longer one.

        Raises:
            ValueError: the two are of different models.
        """
        if (self.layers, self.k) != (other.layers, other.k):
            raise ValueError(f"experts [{self.layers}, {self.k}] and [{other.layers}, {other.k}] are of two models")
        length = max(len(self), len(other))
        mine, theirs = self.resized(length).tensor(), other.resized(length).tensor()
        unknown = (mine == UNKNOWN).all(-1).all(-1)
        return self.of(torch.where(unknown[:, None, None], theirs, mine))


def merged(first: RoutedExperts | None, second: RoutedExperts | None) -> RoutedExperts | None:
    """Return `first.over(second)`, or the one that is not None."""
    return second if first is None else first if second is None else first.over(second)

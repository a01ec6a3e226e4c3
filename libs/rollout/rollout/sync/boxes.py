"""Rectangles of tensors: what a rank holds of one, what a worker wants of it, and what passes between the two."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

Shape = tuple[int, ...]


class Rectangle(Protocol):
    """A rectangle of a tensor, whoever describes it."""

    @property
    def start(self) -> Shape:
        """First index of each dimension."""
        ...

    @property
    def size(self) -> Shape:
        """Length of each dimension."""
        ...


@dataclass(frozen=True, order=True)
class Box:
    """A rectangle of a tensor: `size[d]` indices of dimension d, from `start[d]` on."""

    start: Shape
    size: Shape

    def __post_init__(self) -> None:
        if len(self.start) != len(self.size) or any(at < 0 for at in self.start) or any(n < 0 for n in self.size):
            raise ValueError(f"a box has a start and a size of each dimension, got {self.start} and {self.size}")

    @staticmethod
    def whole(shape: Iterable[int]) -> "Box":
        """Return the box of all elements of a tensor."""
        size = tuple(shape)
        return Box((0,) * len(size), size)

    @staticmethod
    def of(rectangle: Rectangle) -> "Box":
        """Return the box of a rectangle that another library describes."""
        return Box(tuple(rectangle.start), tuple(rectangle.size))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    @property
    def index(self) -> tuple[slice, ...]:
        """The slices that select it."""
        return tuple(slice(at, at + n) for at, n in zip(self.start, self.size, strict=True))

    def fits(self, shape: Iterable[int]) -> bool:
        """Return whether it lies inside a tensor of this shape."""
        sizes = tuple(shape)
        ends = zip(self.start, self.size, sizes, strict=False)
        return len(sizes) == len(self.size) and all(at + n <= size for at, n, size in ends)

    def within(self, other: "Box") -> "Box":
        """Return the same elements, counted from the start of a box that has them all."""
        return Box(tuple(a - b for a, b in zip(self.start, other.start, strict=True)), self.size)

    def overlap(self, other: "Box") -> "Box | None":
        """Return the elements that both have; None where there are none."""
        start, size = [], []
        for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True):
            first, last = max(a, b), min(a + n, b + m)
            if first >= last:
                return None
            start.append(first)
            size.append(last - first)
        return Box(tuple(start), tuple(size))

    def without(self, other: "Box") -> Iterator["Box"]:
        """Yield boxes that have every element of this one once, but for those of `other`, which lies inside it."""
        start, size = list(self.start), list(self.size)
        for d, (first, count) in enumerate(zip(other.start, other.size, strict=True)):
            before, after = first - start[d], start[d] + size[d] - first - count
            if before:
                yield Box(tuple(start), (*size[:d], before, *size[d + 1 :]))
            if after:
                yield Box((*start[:d], first + count, *start[d + 1 :]), (*size[:d], after, *size[d + 1 :]))
            start[d], size[d] = first, count

    def cut(self, most: int) -> Iterator["Box"]:
        """Cut it into boxes of at most `most` elements, along the first dimensions; one of no elements is no box."""
        if not self.numel:
            return
        if self.numel <= most or not self.size:
            yield self
            return
        inner = self.numel // self.size[0]
        rows = max(1, most // inner)
        for at in range(0, self.size[0], rows):
            part = Box((self.start[0] + at, *self.start[1:]), (min(rows, self.size[0] - at), *self.size[1:]))
            if part.numel <= most or len(self.size) == 1:
                yield part
                continue
            for one in Box(part.start[1:], part.size[1:]).cut(most):
                yield Box((part.start[0], *one.start), (1, *one.size))

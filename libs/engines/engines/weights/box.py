"""Rectangles of tensors."""

from dataclasses import dataclass

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Box:
    """A rectangle of a tensor."""

    start: Shape
    size: Shape

    @property
    def index(self) -> tuple[slice, ...]:
        """The slices that select it."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))


def box_of_part(box: Box, index: Index) -> tuple[Box, Index] | None:
    """Return the part of `box` that lies in `tensor[index]`: where it is there, and its index within the box; None
    where the two have no element in common.

    `index` has numbers, which drop a dimension, and slices of step 1; dimensions after its last one are whole.
    """
    start, size = [], []
    own: list[int | slice] = []
    for d, (at, n) in enumerate(zip(box.start, box.size, strict=True)):
        one = index[d] if d < len(index) else slice(None)
        if isinstance(one, int):
            if not at <= one < at + n:
                return None
            own.append(one - at)
            continue
        low = one.start or 0
        first, last = max(at, low), at + n if one.stop is None else min(at + n, one.stop)
        if first >= last:
            return None
        start.append(first - low)
        size.append(last - first)
        own.append(slice(first - at, last - at))
    return Box(tuple(start), tuple(size)), tuple(own)

"""This rank's own shards of the weights under a checkpoint's names: what it can send without any collective.

`own_shards` of an executor says what a rank holds of the live tensors; `export_shards` gives that in the names, parts
and dtypes of `ModelWeights.export`, of which they are boxes. No value is copied or cast here.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from engines.weights.box import Box, Index, Shape, box_of_part
from engines.weights.model_weights import ModelWeights
from engines.weights.row_shards import own_part


class LiveShard(NamedTuple):
    """A box of a live tensor, and what gives its values: indexed by slices, it returns them (a tensor does)."""

    name: str
    box: Box
    values: Any


@dataclass(frozen=True)
class WeightShard:
    """A box of a tensor that rank `owner` holds; others may hold the same.

    `dtype`: what an export has it in; `read` returns values in the dtype in which they are held.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int
    box: Box
    values: Any
    index: Index = ()
    """What of `values` it is: numbers drop a dimension."""

    def read(self, part: Box) -> Tensor:
        """Return the values of a box of the tensor that lies in this one, in its shape: a view where it can be."""
        inner = iter(slice(p - a, p - a + n) for p, a, n in zip(part.start, self.box.start, part.size, strict=True))
        index = self.index or (slice(0, None),) * len(part.size)
        chosen = tuple(one if isinstance(one, int) else _moved(one, next(inner)) for one in index)
        read: Tensor = self.values[chosen]
        return read


@runtime_checkable
class ShardedExecutor(Protocol):
    """Executor that says what this rank holds of the live tensors."""

    def shards(self) -> Iterator[LiveShard]:
        """Yield this rank's boxes, those included that others hold too; ValueError where it cannot say."""
        ...


class OnDisk:
    """A tensor of the checkpoint that a model came from, read when it is indexed."""

    def __init__(self, weights: ModelWeights, name: str) -> None:
        self._weights, self._name = weights, name

    def __getitem__(self, index: Index) -> Tensor:
        """Return a box of it."""
        assert self._weights.source is not None
        ((_, tensor),) = self._weights.source.load((self._name,))
        return tensor[index]


def rows_held(name: str, tensor: Tensor) -> LiveShard | None:
    """Return this rank's part of a tensor that is whole or in shards of FSDP2; None where it has no row of it."""
    own = own_part(tensor)
    shape = tuple(tensor.shape)
    if not shape:
        return LiveShard(name, Box((), ()), own.part)
    cuts = [own.rows, *([] if own.columns is None else [own.columns])]
    cuts += [slice(0, n) for n in shape[len(cuts) :]]
    box = Box(tuple(one.start for one in cuts), tuple(one.stop - one.start for one in cuts))
    return LiveShard(name, box, own.part.detach()) if all(box.size) else None


def export_shards(
    weights: ModelWeights, held: Iterable[LiveShard], rank: int, live: bool = False
) -> Iterator[WeightShard]:
    """Yield a rank's shards as an export names them; those of the carried tensors are rank 0's, on its disk."""
    for one in held:
        shape, dtype = weights.shapes[one.name], _dtype(one.values)
        if live:
            yield WeightShard(one.name, shape, dtype, rank, one.box, one.values)
            continue
        for part in weights.names.parts(one.name, shape):
            inside = box_of_part(one.box, part.index)
            if inside is not None:
                wanted = weights.export_dtype(one.name, part.name, None)
                yield WeightShard(
                    part.name, _part_shape(shape, part.index), wanted, rank, inside[0], one.values, inside[1]
                )
        for copy in weights.copies.get(one.name, ()):
            yield WeightShard(copy, shape, weights.export_dtype(one.name, copy, None), rank, one.box, one.values)
    if live or rank != 0 or weights.source is None:
        return
    for name in weights.carried:
        entry = weights.source.tensors[name]
        assert entry.dtype is not None
        yield WeightShard(
            name, entry.shape, entry.dtype, rank, Box((0,) * len(entry.shape), entry.shape), OnDisk(weights, name)
        )


def _dtype(values: Any) -> torch.dtype:
    dtype: torch.dtype = values.dtype
    return dtype


def _part_shape(shape: Shape, index: Index) -> Shape:
    whole = box_of_part(Box((0,) * len(shape), shape), index)
    assert whole is not None, "a part of a tensor has elements"
    return whole[0].size


def _moved(outer: slice, inner: slice) -> slice:
    first = outer.start or 0
    return slice(first + inner.start, first + inner.stop)

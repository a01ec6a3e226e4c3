"""The parameters of a rank with their map of boxes: filled, exported, and passed to checkpoints."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from engines.megatron.weights.bridge import Box, MappedParameter, Shape
from engines.private_api import empty_wrapper
from engines.weights.shard_export import LiveShard


@dataclass(frozen=True, eq=False)
class HeldParameter:
    """A parameter and its map."""

    held: MappedParameter
    parameter: nn.Parameter


@dataclass(frozen=True, eq=False)
class Part:
    """The elements from `start` up to `stop` of a parameter, flat: those that this rank updates and saves.

    `owned`: whether this rank owns them, which exactly one rank does.
    """

    one: HeldParameter
    start: int
    stop: int
    owned: bool

    @staticmethod
    def whole(one: HeldParameter) -> "Part":
        """Return the part that is all of a parameter."""
        return Part(one, 0, one.parameter.numel(), one.held.owned)

    def of(self, flat: Tensor) -> Tensor:
        """Return the part's elements of `flat`, a tensor as large as the parameter: a view."""
        return flat.view(-1)[self.start : self.stop]

    @property
    def values(self) -> Tensor:
        """The part's elements of the parameter."""
        return self.of(self.one.parameter.detach())


def match(stages: Sequence[nn.Module], held: Sequence[MappedParameter]) -> tuple[HeldParameter, ...]:
    """Pair the map of a rank with its modules; RuntimeError where they differ."""
    live = {(chunk, name): p for chunk, stage in enumerate(stages) for name, p in stage.named_parameters()}
    wanted = {(one.chunk, one.name): one.shape for one in held}
    for key in live.keys() ^ wanted.keys():
        raise RuntimeError(f"megatron-core's model and the map of its weights differ: {key[1]} is in one of them alone")
    for key, shape in wanted.items():
        if tuple(live[key].shape) != shape:
            raise RuntimeError(f"{key[1]} has shape {tuple(live[key].shape)}, the map of weights says {shape}")
    return tuple(HeldParameter(one, live[one.chunk, one.name]) for one in held)


def flat_boxes(size: Shape, start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Cut the elements from `start` up to `stop` of a tensor of this size, in row-major order, into boxes.

    Each comes with the number of its first element; together they have every element once, in order.
    """
    if start >= stop:
        return
    if len(size) == 1:
        yield Box((start,), (stop - start,)), start
        return
    inner = math.prod(size[1:])
    first, last = -(-start // inner), stop // inner  # rows that are whole
    if first > last:  # inside one row
        yield from _in_row(size, last, start, stop)
        return
    yield from _in_row(size, first - 1, start, first * inner)
    if first < last:
        yield Box((first, *(0 for _ in size[1:])), (last - first, *size[1:])), first * inner
    yield from _in_row(size, last, last * inner, stop)


def _in_row(size: Shape, row: int, start: int, stop: int) -> Iterator[tuple[Box, int]]:
    inner = math.prod(size[1:])
    for box, at in flat_boxes(size[1:], start - row * inner, stop - row * inner):
        yield Box((row, *box.start), (1, *box.size)), at + row * inner


def boxes_of(part: Part, values: Tensor) -> Iterator[tuple[str, Box, Tensor]]:
    """Yield (tensor name, box of it, elements of `values` [stop - start] in the box's shape): views."""
    for piece in part.one.held.pieces:
        inner = math.prod(piece.place.size[1:])
        # A piece is some whole rows of a parameter, so its elements lie beside each other.
        assert piece.place.size[1:] == part.one.held.shape[1:]
        first = piece.place.start[0] * inner
        low, high = max(part.start, first), min(part.stop, first + piece.place.size[0] * inner)
        for box, at in flat_boxes(piece.source.size, low - first, high - first):
            moved = Box(tuple(a + b for a, b in zip(box.start, piece.source.start, strict=True)), box.size)
            begin = first + at - part.start
            yield piece.tensor, moved, values[begin : begin + math.prod(box.size)].view(box.size)


def live_shards(parts: Iterable[tuple[Part, Tensor]]) -> Iterator[LiveShard]:
    """Yield the boxes of parts, second copies too, with views of their elements."""
    return (LiveShard(*one) for part, values in parts for one in boxes_of(part, values.detach()))


@torch.no_grad()
def zero_padding(parameters: Sequence[HeldParameter]) -> None:
    """Set the rows that no transformers tensor has to zero."""
    for one in parameters:
        one.parameter[one.held.shape[0] - one.held.padding :].zero_()


@torch.no_grad()
def fill(parts: Iterable[tuple[Part, Tensor]], tensors: Mapping[str, Any]) -> None:
    """Copy a model's weights into parts. Nothing else initialises a parameter of Megatron.

    `tensors`: by name, a tensor or one on disk; indexed, it gives a box of itself.
    """
    for part, values in parts:
        for name, box, own in boxes_of(part, values.detach()):
            own.copy_(tensors[name][box.index])


def whole_tensors(
    parts: Iterable[tuple[Part, Tensor]], shapes: Mapping[str, Shape], like: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield the transformers tensors one at a time, on every rank, on the device of `like`. Collective over the world.

    `parts`: with their elements, in one dtype on all ranks, that of `like`. Each element comes from the one rank that
    owns it. The ranks' bytes are summed, all others being zero, so that an export has the bits of the parameters (a sum
    of numbers would turn -0.0 into 0.0).
    """
    owned: dict[str, list[tuple[Box, Tensor]]] = {}
    for part, values in parts:
        for name, box, elements in boxes_of(part, values) if part.owned else ():
            owned.setdefault(name, []).append((box, elements))
    for name, shape in shapes.items():
        whole = torch.zeros(shape, dtype=like.dtype, device=like.device)
        for box, elements in owned.get(name, ()):
            whole[box.index] = elements.to(like.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(whole.view(torch.uint8))
        yield name, whole


def boxed(
    parts: Sequence[Part], shapes: Mapping[str, Shape], value: Callable[[Part], Tensor]
) -> dict[str, "BoxedTensor"]:
    """Return, for each transformers tensor of which this rank has a part, what a distributed checkpoint writes and
    reads.

    `value` gives the flat tensor that is stored for a part: its weights, or a moment of it. Boxes are of the
    transformers tensor, so a checkpoint fits any layout.
    """
    tensors: dict[str, list[tuple[Box, Tensor, bool]]] = {}
    for part in parts:
        for name, box, stored in boxes_of(part, value(part).detach()):
            tensors.setdefault(name, []).append((box, stored, part.owned))
    return {name: BoxedTensor(shapes[name], tuple(boxes)) for name, boxes in tensors.items()}


class BoxedTensor(torch.Tensor):
    """A tensor of which this rank has some boxes, in the form that torch's distributed checkpoint takes.

    It cannot be computed with: it has a shape, and views of the parameters behind it.
    """

    parts: tuple[tuple[Box, Tensor, bool], ...]

    def __new__(cls, shape: Shape, parts: tuple[tuple[Box, Tensor, bool], ...]) -> "BoxedTensor":
        """Make it from `parts`: boxes, their values, and whether this rank is the one that writes them."""
        values = parts[0][1]
        made: BoxedTensor = empty_wrapper(cls, shape, values)
        made.parts = parts
        return made

    def detach(self) -> "BoxedTensor":
        """Return self: its parts have no gradients."""
        return self

    def to(self, device: str, copy: bool = False) -> "BoxedTensor":  # type: ignore[override]
        """Return it over parts on another device; a checkpoint that is written while training goes on takes a copy."""
        return BoxedTensor(self.shape, tuple((box, part.to(device, copy=copy), own) for box, part, own in self.parts))

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """Return the items that this rank writes."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.start)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)),
                    properties=TensorProperties.create_from_tensor(values),
                    size=self.size(),
                ),
            )
            for box, values, owned in self.parts
            if owned
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the chunks that this rank reads, second copies too."""
        return [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)) for box, _, _ in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the values of the box that begins at the index's offset."""
        return next(values for box, values, _ in self.parts if torch.Size(box.start) == index.offset)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise RuntimeError: nothing is computed with it."""
        del types, args, kwargs
        raise RuntimeError(f"{func} on a tensor that is only a table of its parts")

"""Pieces of matrices go to one rank each, are orthogonalized there, and come back (`engines.muon.exchange_plan`)."""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from engines.muon import zeropower
from engines.muon.exchange_plan import Message, Pair, Piece, rounds_of, shapes_of
from seqpack.comm.collectives import gather_plain

Read = Callable[[int], Tensor]
"""A function from the number of a piece of this rank to its values [size]."""
Take = Callable[[int, Tensor, Pair], None]
"""What gets a piece's number, its part of the result bf16[size], and the shape of its matrix."""


class Exchange:
    """The orthogonalization of matrices of which ranks hold pieces."""

    def __init__(self, pieces: Sequence[Piece], group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Plan it. `group`: the ranks (None: all), `device`: where matrices are put together. Collective."""
        self.device = device
        self.group = group
        self.alone = not dist.is_initialized() or dist.get_world_size(group) == 1
        self.tables: list[list[Piece]] = [[*pieces]] if self.alone else gather_plain([*pieces], group, (Piece,))
        self.own = [*pieces]
        self.rounds = rounds_of(self.tables, 0 if self.alone else dist.get_rank(group))
        shapes = shapes_of(self.tables)
        self.shapes = [shapes[piece.key] for piece in pieces]

    def run(self, read: Read, take: Take) -> None:
        """Compute the orthogonalization of every matrix. Collective."""
        for one in self.rounds:
            come = self._swapped(
                (read(message.piece) for message in one.sent),
                one.sent,
                one.received,
                [self._of_other(message).size for message in one.received],
            )
            matrices = [torch.empty(shape, dtype=zeropower.DTYPE, device=self.device) for shape in one.shapes]
            for message, values in zip(one.received, come, strict=True):
                _box(matrices[message.matrix], self._of_other(message)).copy_(values)
            results = each_zeropower(matrices)
            back = self._swapped(
                (_box(results[message.matrix], self._of_other(message)) for message in one.returned),
                one.returned,
                one.taken,
                [self.own[message.piece].size for message in one.taken],
            )
            for message, values in zip(one.taken, back, strict=True):
                take(message.piece, values, self.shapes[message.piece])

    def _of_other(self, message: Message) -> Piece:
        return self.tables[message.rank][message.piece]

    def _swapped(
        self, values: Iterable[Tensor], out: Sequence[Message], back: Sequence[Message], sizes: Sequence[Pair]
    ) -> list[Tensor]:
        """Send a value for each message of `out`, and return what comes: one of `sizes` for each of `back`."""
        near = [one.to(self.device, zeropower.DTYPE) for one in values]
        if self.alone:
            return near
        coming = [rows * columns for rows, columns in sizes]
        flat = torch.empty(sum(coming), dtype=zeropower.DTYPE, device=self.device)
        going = torch.cat([one.reshape(-1) for one in near]) if near else flat.new_empty(0)
        dist.all_to_all_single(
            flat.view(torch.uint8),  # whatever types a backend sends
            going.view(torch.uint8),
            self._bytes_by_rank(back, coming),
            self._bytes_by_rank(out, [one.numel() for one in near]),
            group=self.group,
        )
        return [part.view(size) for part, size in zip(flat.split(coming), sizes, strict=True)]

    def _bytes_by_rank(self, messages: Sequence[Message], elements: Sequence[int]) -> list[int]:
        out = [0] * len(self.tables)
        for message, count in zip(messages, elements, strict=True):
            out[message.rank] += count * zeropower.DTYPE.itemsize
        return out


def each_zeropower(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return the orthogonalized matrices; those of one shape are computed together."""
    by_shape: dict[torch.Size, list[int]] = {}
    for number, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(number)
    out = [*matrices]
    for numbers in by_shape.values():
        for number, result in zip(
            numbers, zeropower.zeropower_via_newtonschulz(torch.stack([matrices[n] for n in numbers])), strict=True
        ):
            out[number] = result
    return out


def _box(matrix: Tensor, piece: Piece) -> Tensor:
    (row, column), (rows, columns) = piece.start, piece.size
    return matrix[row : row + rows, column : column + columns]

"""The values of a model that was built empty: its tensors on disk, read one at a time, and its other buffers.

Strategy: a rank reads, of each tensor on disk, the rows that it holds, into memory that the model has already. It never
holds more than its share of the model and its rows of the largest tensor on disk, in the dtype that they have there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from engines.weights.model_weights import ModelWeights
from engines.weights.row_shards import Own, own_part


@dataclass(frozen=True)
class DiskWeights:
    """The values of an empty model (`engines.weights.empty_model.empty_model`); made by `of`."""

    weights: ModelWeights
    buffers: Mapping[str, Tensor]
    """Buffers that are in no checkpoint, by name."""

    @staticmethod
    def of(weights: ModelWeights, model: Any) -> "DiskWeights":
        """Keep the buffers of an empty model. ValueError where the weights come from no directory."""
        if weights.source is None:
            raise ValueError("these weights come from no directory: there is nothing to read")
        return DiskWeights(weights, {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta})

    @torch.no_grad()
    def fill(self, model: Any) -> None:
        """Fill a model that has memory: its parameters, whole or the rows that this rank holds, and its buffers.

        Parameters that were added since (adapters) are left alone.
        """
        for name, parameter in model.named_parameters():
            if name in self.weights.shapes:
                self._read_own(name, own_part(parameter))
        self.fill_buffers(model)

    @torch.no_grad()
    def fill_buffers(self, model: Any) -> None:
        """Fill the buffers alone, those of the checkpoint and the others."""
        for name, buffer in model.named_buffers():
            if name in self.buffers:
                buffer.copy_(self.buffers[name])
            else:
                self._read_own(name, own_part(buffer))

    def _read_own(self, name: str, own: Own) -> None:
        if own.columns is None:
            self.read(name, own.part, own.rows)
            return
        for place, row in enumerate(range(own.rows.start, own.rows.stop)):  # one expert at a time is whole
            whole = own.part.new_empty(1, *self.weights.shapes[name][1:])
            self.read(name, whole, slice(row, row + 1))
            own.part[place].copy_(whole[0, own.columns])

    @torch.no_grad()
    def read(self, name: str, own: Tensor, rows: slice) -> None:
        """Fill `own`, which is these rows of the live tensor `name`, in its dtype and where it is."""
        source = self.weights.source
        assert source is not None
        for part in self.weights.names.reads(name, self.weights.shapes[name], rows):
            target = own[part.index] if part.index else own
            # On the device first: a copy that changes the dtype as well would do so in host memory, in another piece.
            target.copy_(source.rows(part.name, part.rows).to(target.device))

    def whole(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the live tensor `name`, whole."""
        shape = self.weights.shapes[name]
        tensor = torch.empty(shape, dtype=dtype, device=device)
        self.read(name, tensor, slice(0, shape[0] if shape else 1))
        return tensor


@dataclass(frozen=True)
class DiskTensors(Mapping[str, "DiskTensor"]):
    """Live tensors on disk by name, none of them in memory."""

    disk: DiskWeights

    def __getitem__(self, name: str) -> "DiskTensor":
        """Return a tensor, and read nothing."""
        return DiskTensor(self.disk, name)

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the names."""
        return iter(self.disk.weights.shapes)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.disk.weights.shapes)


@dataclass(frozen=True)
class DiskTensor:
    """A live tensor on disk: indexed with slices it gives that box, in its dtype on disk."""

    disk: DiskWeights
    name: str

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """Read the rows of a box, and return the box."""
        weights, rows = self.disk.weights, index[0]
        assert weights.source is not None
        shape = weights.shapes[self.name]
        parts = [weights.source.tensors[part.name] for part in weights.names.reads(self.name, shape, rows)]
        dtypes = [part.dtype for part in parts if part.dtype is not None]
        widest = reduce(torch.promote_types, dtypes) if dtypes else torch.float32
        own = torch.empty((rows.stop - rows.start, *shape[1:]), dtype=widest)
        self.disk.read(self.name, own, rows)
        return own[(slice(None), *index[1:])]

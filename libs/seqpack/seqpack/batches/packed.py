"""One row of many sequences (THD): what the model sees, and the way back to the batch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from seqpack.batches.batch import Batch, view_batch
from seqpack.batches.dicts import Shared, build
from seqpack.batches.jagged import Ragged, jagged_from_values, jagged_like
from seqpack.batches.schema import MEDIA_KEYS
from seqpack.batches.view import BatchView
from seqpack.planning.checks import check_indices
from seqpack.planning.padding import PackedGeometry, packed_geometry

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(frozen=True)
class PackedBatch:
    """Sequences one after another in a row of T tokens.

    `values`: per-token tensors of T tokens along their token dimension (the last: (T,) or (4, T), unless
    `token_dims` says otherwise), per-sample tensors (n, ...), media concatenated along dimension 0. `cu_seqlens`:
    int32 boundaries; alignment padding belongs to its sequence, a trailing bucket pad is one more sequence.
    `max_seqlen`: the longest stretch between two boundaries. `positions`: int64 (T,), a token's place in its sequence,
    from 0; what the model gets is `position_ids`. `lengths`: the n true lengths. `indices`: the rows of the source
    batch. `extras`: per-sample Python values by key. `metadata`: values of the whole batch by key.
    """

    values: dict[str, Tensor]
    cu_seqlens: Tensor
    max_seqlen: int
    positions: Tensor
    lengths: tuple[int, ...]
    indices: tuple[int, ...]
    geometry: PackedGeometry
    token_dims: dict[str, int] = field(default_factory=dict)
    media_lengths: dict[str, tuple[int, ...]] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def position_ids(self) -> Tensor:
        """Positions for the model: the batch's own `position_ids`, (T,) or (axes, T), else `positions`."""
        return self.values.get("position_ids", self.positions)

    @property
    def num_sequences(self) -> int:
        """Sequences of the batch in this row; a trailing pad is not counted."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """The tokens T of the row, padding included."""
        return self.geometry.total

    @property
    def token_mask(self) -> Tensor:
        """Bool (T,): True on true tokens, False on alignment and bucket padding."""
        mask = torch.zeros(self.num_tokens, dtype=torch.bool)
        return mask.index_fill_(0, _places(self.geometry), True).to(self.cu_seqlens.device)

    @cached_property
    def _rows(self) -> Tensor:
        """A jagged column of the true sequences, whose offsets all that is unpacked shares."""
        return jagged_from_values(self.positions.new_empty(sum(self.lengths)), self.lengths)

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Return this row with every tensor on `device`."""
        moved = {key: value.to(device) for key, value in self.values.items()}
        return replace(self, values=moved, cu_seqlens=self.cu_seqlens.to(device), positions=self.positions.to(device))

    def with_values(self, **tokens: Tensor) -> "PackedBatch":
        """Return this row with more (or other) per-token tensors, each with T tokens along its last dimension."""
        for key, value in tokens.items():
            if value.dim() < 1 or value.shape[-1] != self.num_tokens:
                raise ValueError(
                    f"{key} has shape {tuple(value.shape)}, its last dimension must be {self.num_tokens} tokens"
                )
        dims = {**self.token_dims, **{key: value.dim() - 1 for key, value in tokens.items()}}
        return replace(self, values={**self.values, **tokens}, token_dims=dims)


def pack_sequences(
    batch: Batch,
    indices: Sequence[int] | None = None,
    align: int = 1,
    bucket: int | Sequence[int] | None = None,
    keys: Sequence[str] | None = None,
    pad_values: Mapping[str, float] | None = None,
) -> PackedBatch:
    """Pack the samples at `indices` (all when None) into one row; `unpack_sequences` is its exact inverse.

    `batch`: a TensorDict, a `BatchView`, or what `view_batch` takes in their place, which needs no tensordict. `align`
    and `bucket` as in `packed_geometry`. `keys` chooses what to carry (everything when None). Padding is 0 (False in
    the masks), or the value that `pad_values` names for a key. Raises ValueError as `check_batch` does, and for keys
    that are missing.
    """
    return _pack(view_batch(batch), indices, align, bucket, keys, pad_values)


def pack_each(
    batch: Batch,
    rows: Iterable[Sequence[int]],
    align: int = 1,
    bucket: int | Sequence[int] | None = None,
    keys: Sequence[str] | None = None,
    pad_values: Mapping[str, float] | None = None,
) -> Iterator[PackedBatch]:
    """Check the batch once and return an iterator of `pack_sequences` for each sequence of indices in `rows`.

    For the micro-batches of a plan: checking costs about as much as packing one of them. The batch must not change
    before the last one is packed.
    """
    parts = view_batch(batch)
    return (_pack(parts, indices, align, bucket, keys, pad_values) for indices in rows)


def _pack(
    batch: BatchView,
    indices: Sequence[int] | None,
    align: int,
    bucket: int | Sequence[int] | None,
    keys: Sequence[str] | None,
    pad_values: Mapping[str, float] | None,
) -> PackedBatch:
    sizes, columns = batch.lengths, batch.columns
    rows = list(range(len(sizes))) if indices is None else check_indices(indices, len(sizes))
    geometry = packed_geometry([sizes[i] for i in rows], align, bucket)
    wanted = set(columns) if keys is None else set(keys)
    missing = (wanted | set(pad_values or ())) - set(columns)
    if missing:
        raise ValueError(f"keys that the batch does not have: {sorted(missing)}")
    values: dict[str, Tensor] = {}
    token_dims: dict[str, int] = {}
    media_lengths: dict[str, tuple[int, ...]] = {}
    extras: dict[str, list[Any]] = {}
    metadata: dict[str, Any] = {}
    for key, value in columns.items():
        if key not in wanted:
            continue
        if isinstance(value, Shared):
            metadata[key] = value.value
        elif isinstance(value, list):
            extras[key] = [value[i] for i in rows]
        elif isinstance(value, Tensor):
            values[key] = value.index_select(0, torch.tensor(rows, dtype=torch.int64, device=value.device))
        elif not isinstance(value, Ragged):
            raise ValueError(f"{key} is a nested TensorDict, which cannot be packed; name the keys to pack without it")
        elif key in MEDIA_KEYS:
            values[key], media_lengths[key] = _media(value, rows)
        else:
            values[key], token_dims[key] = _tokens(value, rows, geometry, (pad_values or {}).get(key, 0))
    return PackedBatch(
        values=values,
        cu_seqlens=torch.tensor(geometry.cu_seqlens, dtype=torch.int32, device=batch.device),
        max_seqlen=geometry.max_seqlen,
        positions=_positions(geometry).to(batch.device),
        lengths=geometry.lengths,
        indices=tuple(rows),
        geometry=geometry,
        token_dims=token_dims,
        media_lengths=media_lengths,
        extras=extras,
        metadata=metadata,
    )


def unpack_tokens(packed: PackedBatch, values: Tensor, token_dim: int = -1) -> Tensor:
    """Cut a tensor of T tokens back into a jagged one of the n true sequences; differentiable."""
    dim = token_dim % values.dim()
    if values.shape[dim] != packed.num_tokens:
        raise ValueError(
            f"dimension {dim} of {tuple(values.shape)} must hold the {packed.num_tokens} tokens of the row"
        )
    if packed.lengths != packed.geometry.aligned or packed.geometry.padding:
        values = values.index_select(dim, packed.token_mask.nonzero().squeeze(1))
    return jagged_like(values, packed._rows, dim)


def unpack_sequences(packed: PackedBatch) -> "TensorDict":
    """Return the batch of the row's samples, in the order of the row, without padding."""
    out: dict[str, Any] = {**packed.extras, **{key: Shared(value) for key, value in packed.metadata.items()}}
    for key, value in packed.values.items():
        if key in packed.token_dims:
            out[key] = unpack_tokens(packed, value, packed.token_dims[key])
        elif key in packed.media_lengths:
            out[key] = jagged_from_values(value, packed.media_lengths[key], 0)
        else:
            out[key] = value
    return build(out, packed.num_sequences, packed.cu_seqlens.device)


def _tokens(parts: Ragged, rows: list[int], geometry: PackedGeometry, fill: float) -> tuple[Tensor, int]:
    """Concatenate the chosen samples along their ragged dimension, each followed by its padding.

    One gather for all samples: a step's micro-batch may hold hundreds of short ones.
    """
    values, dim = parts.values, parts.dim
    source = _spans([parts.starts[row] for row in rows], geometry.lengths)
    taken = values.index_select(dim, source.to(values.device))
    if taken.shape[dim] == geometry.total:
        return taken, dim
    shape = list(values.shape)
    shape[dim] = geometry.total
    return values.new_full(shape, fill).index_copy(dim, _places(geometry).to(values.device), taken), dim


def _places(geometry: PackedGeometry) -> Tensor:
    """Return i64[sum of lengths]: the places of the true tokens in the row."""
    return _spans(geometry.cu_seqlens[: len(geometry.lengths)], geometry.lengths)


def _spans(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return i64[sum of lengths]: `lengths[0]` integers from starts[0] on, then `lengths[1]` from starts[1] on, ..."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    ends = sizes.cumsum(0)
    shift = torch.tensor(starts, dtype=torch.int64) - (ends - sizes)
    return torch.repeat_interleave(shift, sizes) + torch.arange(int(sizes.sum()))


def _media(parts: Ragged, rows: list[int]) -> tuple[Tensor, tuple[int, ...]]:
    pieces = [parts.values.narrow(parts.dim, parts.starts[i], parts.lengths[i]) for i in rows]
    joined = torch.cat(pieces, dim=parts.dim) if pieces else parts.values.narrow(parts.dim, 0, 0)
    return joined, tuple(parts.lengths[i] for i in rows)


def _positions(geometry: PackedGeometry) -> Tensor:
    bounds = torch.tensor(geometry.cu_seqlens, dtype=torch.int64)
    sizes = bounds.diff()
    return torch.arange(geometry.total) - torch.repeat_interleave(bounds[:-1], sizes)

"""chunk, split, index, concat, unbind, pad and back: the same for dense tensors, jagged ones and TensorDicts of both.

Samples lie along dimension 0. Results do not depend on whether lengths happen to be equal, and gradients flow through.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from seqpack.batches.dicts import build, is_tensordict, leaf, leaves, size_of, take
from seqpack.batches.jagged import is_jagged, join, pad, ragged, samples_of, unpad
from seqpack.batches.schema import TOKEN_KEYS
from seqpack.batches.view import BatchView
from seqpack.planning.checks import check_indices, check_lengths, check_positive_int

if TYPE_CHECKING:
    from tensordict import TensorDict

Batch = TypeVar("Batch", Tensor, "TensorDict")
Selectable = TypeVar("Selectable", Tensor, "TensorDict", BatchView)


def num_samples(x: Any) -> int:
    """Return the number of samples of a tensor, a jagged NestedTensor or a TensorDict."""
    if isinstance(x, Tensor):
        if x.is_nested:
            return len(ragged(x).lengths)
        if x.dim() == 0:
            raise ValueError("a scalar tensor has no samples")
        return int(x.shape[0])
    if is_tensordict(x):
        return size_of(x)
    raise ValueError(f"expected a tensor, a jagged NestedTensor or a TensorDict, got {type(x).__name__}")


def index_select(x: Selectable, indices: Sequence[int] | Tensor) -> Selectable:
    """Return the samples at `indices`, in that order, repeats allowed. ValueError names an index out of range.

    Of a `BatchView` the result is a view too, and no token is copied.
    """
    if isinstance(indices, Tensor) and indices.dtype == torch.bool:
        raise ValueError("indices must be integers; turn a mask into indices with mask.nonzero().squeeze(1)")
    if isinstance(x, BatchView):
        return x.select(indices)
    return take(x, check_indices(indices, num_samples(x)))


def split(x: Batch, sizes: int | Sequence[int]) -> list[Batch]:
    """Cut into pieces of the given sizes (zero allowed), which add up to the batch.

    An int is the size of every piece but the last.
    """
    total = num_samples(x)
    if isinstance(sizes, int) and not isinstance(sizes, bool):
        step = check_positive_int(sizes, "sizes")
        counts = [min(step, total - start) for start in range(0, total, step)]
    else:
        counts = check_lengths(sizes, name="sizes", minimum=0)
    if sum(counts) != total:
        raise ValueError(f"sizes add up to {sum(counts)}, the batch has {total} samples")
    ends = list(accumulate(counts))
    return [take(x, list(range(end - count, end))) for end, count in zip(ends, counts, strict=True)]


def chunk(x: Batch, chunks: int) -> list[Batch]:
    """Cut into exactly `chunks` pieces whose sizes differ by at most one, larger ones first; the last may be empty."""
    count = check_positive_int(chunks, "chunks")
    size, larger = divmod(num_samples(x), count)
    return split(x, [size + 1] * larger + [size] * (count - larger))


def unbind(x: Batch) -> list[Batch]:
    """Return the samples one by one: tensors, or TensorDicts without a batch dimension."""
    if isinstance(x, Tensor):
        return samples_of(x) if is_jagged(x) else list(x.unbind(0))
    size = num_samples(x)
    columns = {key: value if isinstance(value, list) else unbind(value) for key, value in leaves(x)}
    return [_one({key: column[i] for key, column in columns.items()}, x.device) for i in range(size)]


def concat(xs: Sequence[Batch]) -> Batch:
    """Join batches along the samples. ValueError names a key missing in one of them, or samples that do not fit."""
    batches = list(xs)
    if not batches:
        raise ValueError("concat needs at least one batch")
    first = batches[0]
    if isinstance(first, Tensor):
        return _concat_tensors(batches)
    for index, batch in enumerate(batches):
        if isinstance(batch, Tensor):
            raise ValueError(f"batch {index} is a {_kind(batch)}, batch 0 is a {_kind(first)}")
    sizes = [num_samples(batch) for batch in batches]
    keys = list(first.keys())
    for index, batch in enumerate(batches):
        differing = set(keys) ^ set(batch.keys())
        if differing:
            raise ValueError(f"batch {index} and batch 0 disagree on the keys {sorted(differing)}")
    joined: dict[str, Any] = {}
    for key in keys:
        column = [leaf(batch, key) for batch in batches]
        try:
            joined[key] = list(chain(*column)) if isinstance(column[0], list) else concat(column)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"key {key!r} cannot be concatenated: {error}") from error
    devices = {batch.device for batch in batches}
    return build(joined, sum(sizes), first.device if len(devices) == 1 else None)


def to_padded(x: Batch, value: float | Mapping[str, float] = 0, length: int | None = None) -> Batch:
    """Return `x` with every jagged tensor padded at its end to the longest sample, or to `length`.

    `value` fills; for a TensorDict it may be a mapping by key (0 for keys it does not name). Dense tensors pass
    unchanged.
    """
    if isinstance(x, Tensor):
        if isinstance(value, Mapping):
            raise ValueError("a mapping of pad values needs a TensorDict")
        return pad(x, value, length) if is_jagged(x) else x
    size = num_samples(x)
    if isinstance(value, Mapping):
        unknown = set(value) - set(x.keys())
        if unknown:
            raise ValueError(f"pad values for keys that the batch does not have: {sorted(unknown)}")
    filled: dict[str, Any] = {}
    for key, entry in leaves(x):
        fill = value.get(key, 0) if isinstance(value, Mapping) else value
        filled[key] = pad(entry, fill, length) if is_jagged(entry) else entry
    return build(filled, size, x.device)


def from_padded(
    x: Batch, lengths: Sequence[int] | Tensor, ragged_dim: int = -1, keys: Sequence[str] | None = None
) -> Batch:
    """Cut row i to its first `lengths[i]` entries along `ragged_dim` (a dimension of one sample): undoes `to_padded`.

    Of a TensorDict the per-token keys of the schema are cut, or exactly `keys`; the rest passes unchanged.
    """
    if isinstance(x, Tensor):
        if keys is not None:
            raise ValueError("keys needs a TensorDict")
        return unpad(x, check_lengths(lengths, minimum=0), ragged_dim)
    sizes = check_lengths(lengths, minimum=0)
    size = num_samples(x)
    missing = set(keys or ()) - set(x.keys())
    if missing:
        raise ValueError(f"keys that the batch does not have: {sorted(missing)}")
    chosen = set(TOKEN_KEYS if keys is None else keys)
    cut = {k: unpad(v, sizes, ragged_dim) if k in chosen else v for k, v in leaves(x)}
    return build(cut, size, x.device)


def _concat_tensors(tensors: list[Any]) -> Any:
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) or tensor.is_nested != tensors[0].is_nested:
            raise ValueError(f"input {index} is a {_kind(tensor)}, input 0 is a {_kind(tensors[0])}")
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(f"input {index} is {tensor.dtype}, input 0 is {tensors[0].dtype}")
    return join(tensors) if tensors[0].is_nested else torch.cat(tensors, dim=0)


def _kind(x: object) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return "jagged NestedTensor" if x.is_nested else "dense tensor"


def _one(values: dict[str, Any], device: torch.device | None) -> Any:
    """Build one sample: a TensorDict without batch dimensions, Python values kept as they are."""
    from tensordict import NonTensorData, TensorDict, TensorDictBase

    tensors = (Tensor, TensorDictBase)
    kept = {k: v if isinstance(v, tensors) else NonTensorData(v) for k, v in values.items()}
    return TensorDict(kept, batch_size=[], device=device)

"""chunk, split, index, concat, unbind, pad and back: the same for dense tensors, jagged ones and TensorDicts of both.

Samples lie along dimension 0. Results do not depend on whether lengths happen to be equal, and gradients flow through.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from seqpack.batches.dicts import Shared, build, is_tensordict, leaf, leaves, size_of, take
from seqpack.batches.jagged import is_jagged, join, pad, ragged, samples_of, unpad
from seqpack.batches.layout import laid_out, parts_of, token_lengths
from seqpack.batches.schema import TOKEN_KEYS
from seqpack.batches.view import BatchView
from seqpack.planning.checks import check_indices, check_lengths, check_positive_int

if TYPE_CHECKING:
    from tensordict import TensorDict

Batch = TypeVar("Batch", Tensor, "TensorDict")
BatchLike = TypeVar("BatchLike", Tensor, "TensorDict", BatchView)


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


def index_select(x: BatchLike, indices: Sequence[int] | Tensor) -> BatchLike:
    """Return the samples at `indices`, in that order, repeats allowed. ValueError names an index out of range.

    Of a `BatchView` the result is a view too, and no token is copied.
    """
    if isinstance(indices, Tensor) and indices.dtype == torch.bool:
        raise ValueError("indices must be integers; turn a mask into indices with mask.nonzero().squeeze(1)")
    if isinstance(x, BatchView):
        return x.select(indices)
    result: BatchLike = take(x, check_indices(indices, num_samples(x)))
    return result


def split(x: Batch, sizes: int | Sequence[int]) -> list[Batch]:
    """Cut a batch into pieces of the given sizes (zero allowed), which add up to its size.

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
    columns = {key: _each(value, size) for key, value in leaves(x)}
    return [_one({key: column[i] for key, column in columns.items()}, x.device) for i in range(size)]


def concat(xs: Sequence[Batch]) -> Batch:
    """Join batches along the samples. ValueError names a key missing in one of them, or samples that do not fit."""
    batches = list(xs)
    if not batches:
        raise ValueError("concat needs at least one batch")
    first = batches[0]
    if isinstance(first, Tensor):
        result: Batch = _concat_tensors(batches)
        return result
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
            joined[key] = _concat_leaves(column, sizes)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"key {key!r} cannot be concatenated: {error}") from error
    devices = {batch.device for batch in batches}
    return build(joined, sum(sizes), first.device if len(devices) == 1 else None)


def to_padded(x: Batch, value: float | Mapping[str, float] = 0, length: int | None = None) -> Batch:
    """Return `x` with every jagged tensor padded at its end to the longest sample, or to `length`.

    `value` fills; for a TensorDict it may be a mapping by key (0 for keys it does not name). Nested TensorDicts are
    padded too, with the fill of their key. Dense tensors pass unchanged. In a batch with `input_ids`, tensors with one
    value a token are padded along their tokens, whatever dimension torch labelled as the ragged one.
    """
    if isinstance(x, Tensor):
        if isinstance(value, Mapping):
            raise ValueError("a mapping of pad values needs a TensorDict")
        return pad(x, value, length) if is_jagged(x) else x
    if isinstance(value, Mapping):
        unknown = set(value) - set(x.keys())
        if unknown:
            raise ValueError(f"pad values for keys that the batch does not have: {sorted(unknown)}")
    fills = value if isinstance(value, Mapping) else dict.fromkeys(x.keys(), value)
    return _padded(x, fills, length, token_lengths(x))


def _padded(x: Any, fills: Mapping[str, float], length: int | None, tokens: list[int] | None) -> Any:
    filled: dict[str, Any] = {}
    for key, entry in leaves(x):
        fill = fills.get(key, 0)
        if is_tensordict(entry):
            filled[key] = _padded(entry, dict.fromkeys(entry.keys(), fill), length, tokens)
        else:
            filled[key] = pad(laid_out(key, entry, tokens), fill, length) if is_jagged(entry) else entry
    return build(filled, size_of(x), x.device)


def from_padded(
    x: Batch,
    lengths: "Sequence[int] | Tensor | TensorDict",
    ragged_dim: int = -1,
    keys: Sequence[str] | None = None,
) -> Batch:
    """Undo `to_padded`: cut row i to its first `lengths[i]` entries along `ragged_dim` (a dimension of one sample).

    Of a TensorDict the per-token keys of the schema are cut, or exactly `keys`, in nested TensorDicts as well. With the
    batch that was padded in the place of `lengths`, every key becomes what it is there: the exact inverse, also for
    keys outside the schema and for media. The rest passes unchanged. ValueError for a key outside the schema that is
    as wide as the tokens: whether it was padded only `keys`, or the batch, can tell.
    """
    if isinstance(x, Tensor):
        if keys is not None or is_tensordict(lengths):
            raise ValueError("keys and a batch as the lengths need a TensorDict to cut")
        return unpad(x, check_lengths(lengths, minimum=0), ragged_dim)
    if is_tensordict(lengths):
        if keys is not None or ragged_dim != -1:
            raise ValueError("keys and ragged_dim have no effect beside a batch that says what was padded")
        return _like(x, lengths, token_lengths(lengths))
    sizes = check_lengths(lengths, minimum=0)
    missing = set(keys or ()) - set(x.keys())
    if missing:
        raise ValueError(f"keys that the batch does not have: {sorted(missing)}")
    return _cut(x, sizes, ragged_dim, keys, _padded_width(x))


def _padded_width(x: Any) -> int | None:
    ids = x.get("input_ids")
    return int(ids.shape[-1]) if isinstance(ids, Tensor) and not ids.is_nested and ids.dim() == 2 else None


def _cut(x: Any, sizes: list[int], ragged_dim: int, keys: Sequence[str] | None, width: int | None) -> Any:
    chosen = set(TOKEN_KEYS if keys is None else keys)
    out: dict[str, Any] = {}
    for key, value in leaves(x):
        if is_tensordict(value):
            out[key] = _cut(value, sizes, ragged_dim, None if keys is None or key in keys else (), width)
        elif key in chosen:
            out[key] = unpad(value, sizes, ragged_dim)
        elif keys is None and isinstance(value, Tensor) and not value.is_nested and width in value.shape[1:]:
            raise ValueError(
                f"{key} is as wide as the {width} padded tokens, but not a key of the schema: give the batch that was "
                "padded as `lengths`, or name in `keys` what to cut"
            )
        else:
            out[key] = value
    return build(out, size_of(x), x.device)


def _like(x: Any, original: Any, tokens: list[int] | None) -> Any:
    """Cut the keys of `x` that are jagged in `original` to their lengths there."""
    out: dict[str, Any] = {}
    for key, value in leaves(x):
        entry = original.get(key)
        if is_tensordict(value) and is_tensordict(entry):
            out[key] = _like(value, entry, tokens)
        elif is_jagged(entry) and isinstance(value, Tensor) and not value.is_nested:
            parts = parts_of(key, entry, tokens)
            out[key] = unpad(value, parts.lengths, parts.dim)
        else:
            out[key] = value
    return build(out, size_of(x), x.device)


def _each(value: Any, size: int) -> list[Any]:
    """Return the values of the samples one by one."""
    if isinstance(value, Shared):
        return [value.value] * size
    return value if isinstance(value, list) else unbind(value)


def _concat_leaves(column: list[Any], sizes: list[int]) -> Any:
    """Join the values of batches under one key; metadata that differs becomes one value a sample."""
    if all(isinstance(value, Shared) for value in column) and all(_same(column[0], value) for value in column[1:]):
        return column[0]
    if any(isinstance(value, Shared | list) for value in column):
        parts = [
            _each(value, size) if isinstance(value, Shared) else value
            for value, size in zip(column, sizes, strict=True)
        ]
        if not all(isinstance(part, list) for part in parts):
            raise ValueError("it holds Python values in some batches and tensors in others")
        return list(chain(*parts))
    return concat(column)


def _same(left: Shared, right: Shared) -> bool:
    """Return whether metadata is equal; where == gives no single truth value (arrays), whether it is identical."""
    try:
        return left.value is right.value or (type(left.value) is type(right.value) and bool(left.value == right.value))
    except (ValueError, RuntimeError, TypeError):
        return False


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
    """Build one sample: a TensorDict without batch dimensions, Python values unchanged."""
    from tensordict import NonTensorData, TensorDict, TensorDictBase

    tensors = (Tensor, TensorDictBase)
    fields = {k: v if isinstance(v, tensors) else NonTensorData(v) for k, v in values.items()}
    return TensorDict(fields, batch_size=[], device=device)

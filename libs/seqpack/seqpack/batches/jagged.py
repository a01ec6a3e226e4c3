"""One canonical jagged layout, whatever the lengths happen to be.

torch chooses the ragged dimension of a NestedTensor by looking at whether the sizes differ, so a batch of equal
lengths (or of one sample) gets another layout than its neighbour. Here the caller names the dimension, and
everything is read back through the public `values()`, `offsets()`, `lengths()` and `shape`.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpack.planning.checks import check_lengths


class Ragged(NamedTuple):
    """The parts of a jagged NestedTensor: sample i is `values.narrow(dim, starts[i], lengths[i])`."""

    values: Tensor
    starts: list[int]
    lengths: list[int]
    dim: int


def is_jagged(x: object) -> bool:
    """Return whether `x` is a NestedTensor of the jagged layout."""
    return isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged


def jagged(tensors: Sequence[Tensor], ragged_dim: int = -1) -> Tensor:
    """Join samples that differ along `ragged_dim` (a dimension of one sample) into a jagged NestedTensor.

    The result has one dimension more than a sample: (j,) samples give (B, j), (3, j) samples give (B, 3, j).
    Differentiable. Raises ValueError for no samples, or for the first sample that differs from sample 0 in rank,
    dtype, device or another size.
    """
    samples = list(tensors)
    if not samples:
        raise ValueError("jagged needs at least one sample: the other sizes of an empty batch are unknown")
    first = samples[0]
    for index, sample in enumerate(samples):
        if not isinstance(sample, Tensor) or sample.is_nested:
            raise ValueError(f"sample {index} must be a plain tensor, got {type(sample).__name__}")
    dim = check_ragged_dim(ragged_dim, first.dim())
    before, after, dtype, device = first.shape[:dim], first.shape[dim + 1 :], first.dtype, first.device
    for index, sample in enumerate(samples):
        shape = sample.shape
        if len(shape) != first.dim() or shape[:dim] != before or shape[dim + 1 :] != after:
            raise ValueError(
                f"sample {index} has shape {tuple(shape)}, which differs from {tuple(first.shape)} of sample 0 "
                f"outside the ragged dimension {dim}"
            )
        if sample.dtype != dtype or sample.device != device:
            raise ValueError(f"sample {index} is {sample.dtype} on {sample.device}, sample 0 is {dtype} on {device}")
    return jagged_from_values(torch.cat(samples, dim=dim), [s.shape[dim] for s in samples], dim)


def jagged_from_values(values: Tensor, lengths: Sequence[int], ragged_dim: int = -1) -> Tensor:
    """View `values`, in which the samples lie one after another along `ragged_dim`, as a jagged NestedTensor."""
    sizes = check_lengths(lengths, minimum=0)
    dim = check_ragged_dim(ragged_dim, values.dim())
    if sum(sizes) != values.shape[dim]:
        raise ValueError(f"lengths add up to {sum(sizes)}, but dimension {dim} of values is {values.shape[dim]}")
    return _view(values, torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0).to(values.device), sizes, dim)


def jagged_like(values: Tensor, like: Tensor, ragged_dim: int = -1) -> Tensor:
    """View `values` as a jagged NestedTensor with the lengths of `like` and its offsets object: the two compose.

    Where `like` lies on another device, or has holes, the offsets are new.
    """
    nested: Any = like
    sizes, dim = ragged(like).lengths, check_ragged_dim(ragged_dim, values.dim())
    if nested.lengths() is not None or values.device != like.device or values.shape[dim] != sum(sizes):
        return jagged_from_values(values, sizes, dim)
    return _view(values, nested.offsets(), sizes, dim)


def _view(values: Tensor, offsets: Tensor, sizes: list[int], dim: int) -> Tensor:
    # Explicit bounds: without them torch pads to the wrong width when the ragged dimension is not the first.
    return torch.nested.nested_tensor_from_jagged(
        values, offsets=offsets, jagged_dim=dim + 1, min_seqlen=min(sizes, default=0), max_seqlen=max(sizes, default=0)
    )


def ragged(x: Tensor) -> Ragged:
    """Return the parts of a jagged NestedTensor, which may have holes (`narrow`) or a wrong ragged dimension."""
    if not is_jagged(x):
        raise ValueError(f"expected a NestedTensor of layout torch.jagged, got {_describe(x)}")
    nested: Any = x  # the stubs of Tensor do not know the accessors of the jagged layout
    values, offsets, lengths = nested.values(), nested.offsets().tolist(), nested.lengths()
    sizes = [b - a for a, b in pairwise(offsets)] if lengths is None else lengths.tolist()
    labelled = [d - 1 for d, size in enumerate(x.shape) if d > 0 and not isinstance(size, int)]
    dim = labelled[0] if labelled else 0
    if lengths is None and values.shape[dim] != offsets[-1]:
        fitting = [d for d, size in enumerate(values.shape) if size == offsets[-1]]
        if len(fitting) != 1:
            raise ValueError(
                f"offsets end at {offsets[-1]}, the size of no single dimension of values {tuple(values.shape)}"
            )
        dim = fitting[0]
    return Ragged(values, offsets[: len(sizes)], sizes, dim)


def ragged_dim(x: Tensor) -> int:
    """Return the dimension of one sample of `x` along which samples differ."""
    return ragged(x).dim


def samples_of(x: Tensor) -> list[Tensor]:
    """Return the samples as views of the values, differentiable."""
    parts = ragged(x)
    return [parts.values.narrow(parts.dim, s, n) for s, n in zip(parts.starts, parts.lengths, strict=True)]


def flattened(parts: Ragged) -> Tensor:
    """Return the samples one after another along the ragged dimension, without a copy where they already lie so."""
    if _dense(parts):
        return parts.values
    pieces = [parts.values.narrow(parts.dim, s, n) for s, n in zip(parts.starts, parts.lengths, strict=True)]
    return torch.cat(pieces, dim=parts.dim) if pieces else parts.values.narrow(parts.dim, 0, 0)


def settled(parts: Ragged, lengths: Sequence[int], dim: int | None = None) -> Ragged:
    """Return the parts ragged along the dimension in which the samples have these lengths.

    torch names the first dimension of a sample where all samples are alike (equal lengths, or one row), so that a label
    says nothing; what must be ragged is known from `input_ids`. `dim` (of a sample, may be negative) is the dimension
    that is expected; None: the labelled one where it has the lengths, else the last that has. Unchanged where no
    dimension has the lengths, which is for the caller to refuse.
    """
    if not parts.lengths or len(parts.lengths) != len(lengths):
        return parts
    wanted = parts.dim if dim is None else dim % parts.values.dim()
    if parts.dim == wanted and parts.lengths == list(lengths):
        return parts
    sizes = [list(parts.values.shape) for _ in parts.lengths]
    for size, length in zip(sizes, parts.lengths, strict=True):
        size[parts.dim] = length
    fitting = [d for d in range(parts.values.dim()) if all(s[d] == n for s, n in zip(sizes, lengths, strict=True))]
    chosen = max(fitting, default=None) if dim is None else wanted if wanted in fitting else None
    if chosen is None or chosen == parts.dim:
        return parts
    pieces = [parts.values.narrow(parts.dim, s, n) for s, n in zip(parts.starts, parts.lengths, strict=True)]
    starts = [0, *accumulate(lengths)][:-1]
    return Ragged(torch.cat(pieces, dim=chosen), starts, list(lengths), chosen)


def select(x: Tensor, indices: Sequence[int]) -> Tensor:
    """Return the samples at `indices` in that order; a run of neighbours is a view, anything else a copy."""
    parts = ragged(x)
    sizes = [parts.lengths[i] for i in indices]
    starts = [parts.starts[i] for i in indices]
    touching = all(a + n == b for a, n, b in zip(starts, sizes, starts[1:], strict=False))
    if not starts:
        values = parts.values.narrow(parts.dim, 0, 0)
    elif touching:
        values = parts.values.narrow(parts.dim, starts[0], sum(sizes))
    else:
        values = torch.cat(
            [parts.values.narrow(parts.dim, s, n) for s, n in zip(starts, sizes, strict=True)], dim=parts.dim
        )
    return jagged_from_values(values, sizes, parts.dim)


def join(xs: Sequence[Tensor]) -> Tensor:
    """Concatenate jagged NestedTensors along the batch, also where their ragged dimensions differ.

    The dimension along which samples really differ wins; where none does, the common label, else the last dimension.
    """
    parts = [ragged(x) for x in xs]
    ranks = {p.values.dim() for p in parts}
    if len(ranks) != 1:
        raise ValueError(f"inputs have samples of different ranks: {sorted(ranks)}")
    if len({_layout(p) for p in parts}) == 1 and all(_dense(p) for p in parts):
        dim = parts[0].dim
        return jagged_from_values(
            torch.cat([p.values for p in parts], dim=dim), [n for p in parts for n in p.lengths], dim
        )
    samples = [s for x in xs for s in samples_of(x)]
    if not samples:
        return xs[0]
    varying = [d for d in range(samples[0].dim()) if len({s.shape[d] for s in samples}) > 1]
    labels = {p.dim for p in parts if p.lengths}
    if len(varying) > 1:
        raise ValueError(f"samples differ along dimensions {varying}; only one may be ragged")
    dim = varying[0] if varying else (labels.pop() if len(labels) == 1 else samples[0].dim() - 1)
    return jagged(samples, dim)


def pad(x: Tensor, value: float = 0, length: int | None = None) -> Tensor:
    """Return the dense (B, ...) tensor of the samples, each padded with `value` at its end to `length`."""
    parts = ragged(x)
    longest = max(parts.lengths, default=0)
    width = longest if length is None else length
    if width < longest:
        raise ValueError(f"length {width} is shorter than the longest sample ({longest})")
    values = parts.values.movedim(parts.dim, 0)
    sizes = torch.tensor(parts.lengths, dtype=torch.int64)
    rows = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    columns = torch.arange(len(rows)) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    source = columns + torch.repeat_interleave(torch.tensor(parts.starts, dtype=torch.int64), sizes)
    out = values.new_full((len(sizes), width, *values.shape[1:]), value)
    device = values.device
    out = out.index_put((rows.to(device), columns.to(device)), values.index_select(0, source.to(device)))
    return out.movedim(1, parts.dim + 1)


def unpad(x: Tensor, lengths: Sequence[int], ragged_dim: int = -1) -> Tensor:
    """Cut row i of the dense (B, ...) tensor to its first `lengths[i]` entries along the samples' `ragged_dim`."""
    if x.is_nested:
        raise ValueError("from_padded takes a dense tensor, got a NestedTensor")
    if x.dim() < 2:
        raise ValueError(f"from_padded needs a batch and a ragged dimension, got shape {tuple(x.shape)}")
    dim = check_ragged_dim(ragged_dim, x.dim() - 1)
    sizes = check_lengths(lengths, minimum=0)
    if len(sizes) != x.shape[0]:
        raise ValueError(f"{len(sizes)} lengths for {x.shape[0]} rows")
    width = x.shape[dim + 1]
    for index, size in enumerate(sizes):
        if size > width:
            raise ValueError(f"lengths[{index}] = {size} exceeds the padded width {width}")
    keep = torch.arange(width).unsqueeze(0) < torch.tensor(sizes, dtype=torch.int64).unsqueeze(1)
    values = x.movedim(dim + 1, 1).flatten(0, 1)
    values = values.index_select(0, keep.flatten().nonzero().squeeze(1).to(x.device)).movedim(0, dim)
    return jagged_from_values(values.contiguous(), sizes, dim)


def check_ragged_dim(dim: int, rank: int) -> int:
    """Return `dim` counted from the front of a sample of `rank` dimensions, or raise ValueError."""
    if rank < 1:
        raise ValueError("a sample needs at least one dimension to be ragged along; stack scalars with torch.stack")
    if not -rank <= dim < rank:
        raise ValueError(f"ragged_dim {dim} is out of range for samples of {rank} dimensions")
    return dim % rank


def _dense(parts: Ragged) -> bool:
    """Return whether the samples lie in order without holes."""
    ends = [s + n for s, n in zip(parts.starts, parts.lengths, strict=True)]
    return parts.starts == [0, *ends][: len(ends)] and (ends[-1] if ends else 0) == parts.values.shape[parts.dim]


def _layout(parts: Ragged) -> tuple[object, ...]:
    """Return the properties that must agree before values can be concatenated."""
    beside = tuple(size for d, size in enumerate(parts.values.shape) if d != parts.dim)
    return parts.dim, beside, parts.values.dtype, parts.values.device


def _describe(x: object) -> str:
    return (
        f"a dense tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) and not x.is_nested else type(x).__name__
    )

"""What the jagged algebra must do on any device, held against plain lists of tensors that stay on the CPU.

Each property of `PROPERTIES` draws its own case, so that a test calls `PROPERTIES[name](data, device)` under `given`.
"""

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from seqpack.batches.jagged import jagged, ragged_dim
from seqpack.batches.operations import chunk, concat, from_padded, index_select, num_samples, split, to_padded, unbind

Samples = list[Tensor]


def saved(x: Any) -> Any:
    """Return `x` after torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(x: Any) -> Any:
    """Return `x` after pickling."""
    return pickle.loads(pickle.dumps(x))


# Ways of travel, each `(x, device) -> x`; the last stop is the device again.
TRANSFERS: dict[str, Callable[[Any, str], Any]] = {
    "as it is": lambda x, _: x,
    "pickle": lambda x, _: pickled(x),
    "save": lambda x, _: saved(x),
    "clone": lambda x, _: x.clone(),
    "to the host and back": lambda x, device: x.to("cpu").to(device),
    "pickled on the host": lambda x, device: pickled(x.to("cpu")).to(device),
}


@dataclass(frozen=True)
class Case:
    """Samples of one to three dimensions (on the CPU) that differ along `dim`, and how they travel."""

    tensors: Samples
    dim: int
    transfer: str
    device: str

    def transferred(self, x: Any) -> Any:
        """Return `x` after it was moved as the case says."""
        return TRANSFERS[self.transfer](x, self.device)

    def nested(self, tensors: Samples | None = None) -> Tensor:
        """Return the samples, or others of the kind, as a jagged tensor of the device after the journey."""
        chosen = self.tensors if tensors is None else tensors
        x: Tensor = self.transferred(jagged(moved(chosen, self.device), self.dim))
        return x

    def check(self, left: Samples, right: Samples) -> None:
        """Assert that `left`, on the device, holds what `right` does on the CPU."""
        assert_same(left, right, self.device)


def moved(tensors: Samples, device: str) -> Samples:
    """Return the tensors on the device."""
    return [t.to(device) for t in tensors]


def assert_same(left: Samples, right: Samples, device: str = "cpu") -> None:
    """Assert equal types, shapes and values, and that `left` lies on the device."""
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.device.type == device
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a.cpu(), b)


@st.composite
def cases(draw: st.DrawFn, device: str) -> Case:
    """Draw a case: rank, ragged dimension, lengths (equal ones, 0, a batch of one), dtype and journey."""
    rank = draw(st.integers(1, 3))
    dim = draw(st.integers(0, rank - 1))
    beside = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=rank, max_size=rank))
    lengths = draw(
        st.one_of(
            st.lists(st.integers(0, 5), min_size=1, max_size=6),
            st.builds(lambda n, times: [n] * times, st.integers(0, 4), st.integers(1, 5)),
        )
    )
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bool]))
    made = []
    for i, n in enumerate(lengths):
        shape = [n if d == dim else size for d, size in enumerate(beside)]
        values = torch.arange(torch.Size(shape).numel()).reshape(shape) + 7 * i
        made.append((values % 3 == 0) if dtype == torch.bool else values.to(dtype))
    return Case(made, dim, draw(st.sampled_from(sorted(TRANSFERS))), device)


def index_select_takes_the_given_samples(data: st.DataObject, device: str) -> None:
    """Assert it for a list and a tensor of indices, repeats included."""
    case = data.draw(cases(device))
    x = case.nested()
    rows = data.draw(st.lists(st.integers(0, len(case.tensors) - 1), max_size=6))
    expected = [case.tensors[i] for i in rows]
    result = index_select(x, rows)
    case.check(unbind(result), expected)
    assert num_samples(result) == len(rows)
    assert ragged_dim(result) == case.dim
    case.check(unbind(index_select(x, torch.tensor(rows, dtype=torch.int64, device=device))), expected)


def chunk_then_concat_is_the_identity(data: st.DataObject, device: str) -> None:
    """Assert it, and that sizes differ by at most one, larger ones first; each piece travels by itself."""
    case, count = data.draw(cases(device)), data.draw(st.integers(1, 8))
    pieces = chunk(case.nested(), count)
    counts = [num_samples(piece) for piece in pieces]
    assert len(pieces) == count
    assert sum(counts) == len(case.tensors)
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
    case.check([s for piece in pieces for s in unbind(piece)], case.tensors)
    back = concat([case.transferred(piece) for piece in pieces])
    case.check(unbind(back), case.tensors)
    assert ragged_dim(back) == case.dim


def split_cuts_at_the_given_sizes(data: st.DataObject, device: str) -> None:
    """Assert it for a list of sizes, some of them zero, and for one size."""
    case = data.draw(cases(device))
    x, total = case.nested(), len(case.tensors)
    bounds = [0, *sorted(data.draw(st.lists(st.integers(0, total), max_size=4))), total]
    pieces = split(x, [b - a for a, b in pairwise(bounds)])
    assert len(pieces) == len(bounds) - 1
    for piece, (a, b) in zip(pieces, pairwise(bounds), strict=True):
        case.check(unbind(piece), case.tensors[a:b])
    step = data.draw(st.integers(1, 7))
    for start, piece in zip(range(0, total, step), split(x, step), strict=True):
        case.check(unbind(piece), case.tensors[start : start + step])


def concat_joins_batches_of_any_lengths(data: st.DataObject, device: str) -> None:
    """Assert it for two batches with lengths of their own and the same other sizes."""
    case, more = data.draw(cases(device)), data.draw(st.integers(1, 6))
    first = case.tensors[0]
    others = []
    for i in range(more):
        shape = [i % 4 if d == case.dim else size for d, size in enumerate(first.shape)]
        others.append(torch.zeros(shape, dtype=first.dtype))
    x = concat([case.nested(), case.nested(others)])
    case.check(unbind(x), case.tensors + others)
    assert ragged_dim(x) == case.dim


def padded_and_back_is_the_identity(data: st.DataObject, device: str) -> None:
    """Assert it, and that the padding is in its place and holds the requested value."""
    case, more = data.draw(cases(device)), data.draw(st.integers(0, 3))
    tensors, dim = case.tensors, case.dim
    lengths = [t.shape[dim] for t in tensors]
    width = max(lengths) + more
    dense = to_padded(case.nested(), 1, length=width)
    assert not dense.is_nested
    assert dense.device.type == device
    assert dense.shape[dim + 1] == width
    for row, tensor in zip(dense.cpu(), tensors, strict=True):
        assert torch.equal(row.narrow(dim, 0, tensor.shape[dim]), tensor)
        assert (row.narrow(dim, tensor.shape[dim], width - tensor.shape[dim]) == 1).all()
    back = from_padded(dense, lengths, dim)
    case.check(unbind(back), tensors)
    assert ragged_dim(back) == dim
    assert to_padded(case.nested()).shape[dim + 1] == max(lengths)


def inferred_ragged_dimension_is_fixed(data: st.DataObject, device: str) -> None:
    """Assert that shards laid out by torch, which differs where lengths are equal, join as their lists do."""
    case, count = data.draw(cases(device)), data.draw(st.integers(1, 4))
    tensors = case.tensors
    shards = [tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]]
    made = [torch.nested.as_nested_tensor(moved(s, device), layout=torch.jagged) for s in shards if s]
    x = concat([case.transferred(nested) for nested in made])
    case.check(unbind(x), tensors)
    rows = data.draw(st.lists(st.integers(0, len(tensors) - 1), min_size=1, max_size=6))
    case.check(unbind(index_select(concat(chunk(x, count)), rows)), [tensors[i] for i in rows])
    if len({t.shape for t in tensors}) > 1:
        assert ragged_dim(x) == case.dim
        assert to_padded(x).shape[case.dim + 1] == max(t.shape[case.dim] for t in tensors)


def gradients_equal_those_of_plain_tensors(data: st.DataObject, device: str) -> None:
    """Assert it through index, chunk, concat, pad, unpad, unbind and a move between devices, in float64."""
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    dim = data.draw(st.integers(0, 1))
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=6))
    plain = [torch.randn(*((n, 2) if dim == 0 else (2, n)), dtype=torch.float64, requires_grad=True) for n in lengths]
    leaves = [p.detach().to(device, copy=True).requires_grad_() for p in plain]

    def loss(parts: Samples) -> Tensor:
        return torch.stack([(i + 1) * (p**3).sum() for i, p in enumerate(parts)]).sum()

    loss([plain[i] for i in rows]).backward()
    x = index_select(jagged(leaves, dim), rows)
    x = concat(chunk(x, 2)).to("cpu").to(device)
    x = from_padded(to_padded(x, 9.0), [lengths[i] for i in rows], dim)
    loss(unbind(x)).backward()
    for a, b in zip(plain, leaves, strict=True):
        expected = torch.zeros_like(a) if a.grad is None else a.grad
        assert torch.allclose(expected, torch.zeros_like(a) if b.grad is None else b.grad.cpu())


def dense_tensors_have_the_same_properties(data: st.DataObject, device: str) -> None:
    """Assert that chunks are torch's, and that nothing is padded."""
    values = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    count = data.draw(st.integers(1, 4))
    x = torch.tensor(values, device=device)
    assert_same(chunk(x, count), list(torch.tensor_split(torch.tensor(values), count)), device)
    assert_same([concat(chunk(x, count))], [torch.tensor(values)], device)
    assert [int(v) for v in unbind(x)] == values
    assert to_padded(x) is x


PROPERTIES: dict[str, Callable[[st.DataObject, str], None]] = {
    check.__name__: check
    for check in (
        index_select_takes_the_given_samples,
        chunk_then_concat_is_the_identity,
        split_cuts_at_the_given_sizes,
        concat_joins_batches_of_any_lengths,
        padded_and_back_is_the_identity,
        inferred_ragged_dimension_is_fixed,
        gradients_equal_those_of_plain_tensors,
        dense_tensors_have_the_same_properties,
    )
}

"""Every operation against plain lists of tensors, over ranks, ragged dimensions, lengths and ways of travel."""

import io
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from seqpack.algebra import chunk, concat, from_padded, index_select, num_samples, split, to_padded, unbind
from seqpack.jagged import jagged, ragged_dim

Samples = list[torch.Tensor]


def saved(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


JOURNEYS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda x: x,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": saved,
    "device": lambda x: x.to("cpu"),
    "clone": lambda x: x.clone(),
}
DICT_JOURNEYS = {
    **JOURNEYS,
    "consolidate": lambda x: x.consolidate(),
    "consolidate and pickle": lambda x: pickle.loads(pickle.dumps(x.consolidate())),
    "twice": lambda x: pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(x.consolidate())))),
}


@st.composite
def samples(draw: st.DrawFn, min_size: int = 1) -> tuple[Samples, int]:
    """Samples of one to three dimensions that differ along one of them, and which."""
    rank = draw(st.integers(1, 3))
    dim = draw(st.integers(0, rank - 1))
    beside = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=rank, max_size=rank))
    lengths = draw(
        st.one_of(
            st.lists(st.integers(0, 5), min_size=min_size, max_size=6),
            st.builds(lambda n, times: [n] * times, st.integers(0, 4), st.integers(min_size, 5)),
        )
    )
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bool]))
    made = []
    for i, n in enumerate(lengths):
        shape = [n if d == dim else size for d, size in enumerate(beside)]
        values = torch.arange(torch.Size(shape).numel()).reshape(shape) + 7 * i
        made.append((values % 3 == 0) if dtype == torch.bool else values.to(dtype))
    return made, dim


def assert_same(left: Samples, right: Samples) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a, b)


journeys = st.sampled_from(sorted(JOURNEYS))


@given(samples(), journeys, st.data())
def test_index_select(case: tuple[Samples, int], journey: str, data: st.DataObject) -> None:
    tensors, dim = case
    x = JOURNEYS[journey](jagged(tensors, dim))
    rows = data.draw(st.lists(st.integers(0, len(tensors) - 1), max_size=6))
    result = index_select(x, rows)
    assert_same(unbind(result), [tensors[i] for i in rows])
    assert num_samples(result) == len(rows)
    assert ragged_dim(result) == dim
    assert_same(unbind(index_select(x, torch.tensor(rows, dtype=torch.int64))), [tensors[i] for i in rows])


@given(samples(), journeys, st.integers(1, 8))
def test_chunk_then_concat_is_the_identity(case: tuple[Samples, int], journey: str, count: int) -> None:
    tensors, dim = case
    pieces = chunk(JOURNEYS[journey](jagged(tensors, dim)), count)
    counts = [num_samples(piece) for piece in pieces]
    assert len(pieces) == count
    assert sum(counts) == len(tensors)
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
    assert_same([s for piece in pieces for s in unbind(piece)], tensors)
    back = concat([JOURNEYS[journey](piece) for piece in pieces])
    assert_same(unbind(back), tensors)
    assert ragged_dim(back) == dim


@given(samples(), journeys, st.data())
def test_split(case: tuple[Samples, int], journey: str, data: st.DataObject) -> None:
    tensors, dim = case
    x = JOURNEYS[journey](jagged(tensors, dim))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tensors)), max_size=4)))
    bounds = [0, *cuts, len(tensors)]
    pieces = split(x, [b - a for a, b in pairwise(bounds)])
    assert len(pieces) == len(bounds) - 1
    for piece, (a, b) in zip(pieces, pairwise(bounds), strict=True):
        assert_same(unbind(piece), tensors[a:b])
    step = data.draw(st.integers(1, 7))
    for start, piece in zip(range(0, len(tensors), step), split(x, step), strict=True):
        assert_same(unbind(piece), tensors[start : start + step])


@given(samples(), samples(), journeys)
def test_concat_of_batches_with_the_same_beside(
    left: tuple[Samples, int], right: tuple[Samples, int], journey: str
) -> None:
    tensors, dim = left
    first = tensors[0]
    others = []
    for i in range(len(right[0])):  # the other batch: the same sizes beside, lengths of its own
        shape = [i % 4 if d == dim else size for d, size in enumerate(first.shape)]
        others.append(torch.zeros(shape, dtype=first.dtype))
    x = concat([JOURNEYS[journey](jagged(tensors, dim)), JOURNEYS[journey](jagged(others, dim))])
    assert_same(unbind(x), tensors + others)
    assert ragged_dim(x) == dim


@given(samples(), journeys, st.integers(0, 3))
def test_padded_and_back(case: tuple[Samples, int], journey: str, more: int) -> None:
    tensors, dim = case
    lengths = [t.shape[dim] for t in tensors]
    width = max(lengths) + more
    dense = to_padded(JOURNEYS[journey](jagged(tensors, dim)), 1, length=width)
    assert isinstance(dense, torch.Tensor)
    assert dense.shape[dim + 1] == width
    for row, tensor in zip(dense, tensors, strict=True):
        assert torch.equal(row.narrow(dim, 0, tensor.shape[dim]), tensor)
        assert (row.narrow(dim, tensor.shape[dim], width - tensor.shape[dim]) == 1).all()
    back = from_padded(dense, lengths, dim)
    assert_same(unbind(back), tensors)
    assert ragged_dim(back) == dim
    assert to_padded(jagged(tensors, dim)).shape[dim + 1] == max(lengths)


@given(samples(), journeys, st.integers(1, 4), st.data())
def test_whatever_dimension_torch_chose(
    case: tuple[Samples, int], journey: str, count: int, data: st.DataObject
) -> None:
    tensors, dim = case
    shards = [tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]]
    made = [torch.nested.as_nested_tensor(shard, layout=torch.jagged) for shard in shards if shard]
    x = concat([JOURNEYS[journey](nested) for nested in made])
    assert_same(unbind(x), tensors)
    rows = data.draw(st.lists(st.integers(0, len(tensors) - 1), min_size=1, max_size=6))
    assert_same(unbind(index_select(concat(chunk(x, count)), rows)), [tensors[i] for i in rows])
    if len({t.shape for t in tensors}) > 1:
        assert ragged_dim(x) == dim
        assert to_padded(x).shape[dim + 1] == max(t.shape[dim] for t in tensors)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(0, 1), st.data())
def test_gradients_equal_those_of_plain_tensors(lengths: list[int], dim: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=6))
    plain = [torch.randn(*((n, 2) if dim == 0 else (2, n)), dtype=torch.float64, requires_grad=True) for n in lengths]
    leaves = [p.detach().clone().requires_grad_() for p in plain]

    def loss(parts: Samples) -> torch.Tensor:
        return torch.stack([(i + 1) * (p**3).sum() for i, p in enumerate(parts)]).sum()

    loss([plain[i] for i in rows]).backward()
    x = index_select(jagged(leaves, dim), rows)
    x = concat(chunk(x, 2))
    x = from_padded(to_padded(x, 9.0), [lengths[i] for i in rows], dim)
    loss(unbind(x)).backward()
    for a, b in zip(plain, leaves, strict=True):
        expected = torch.zeros_like(a) if a.grad is None else a.grad
        assert torch.allclose(expected, torch.zeros_like(b) if b.grad is None else b.grad)


def batch_of(lengths: list[int]) -> tuple[TensorDict, list[dict[str, Any]]]:
    """A TensorDict of everything a batch may hold, and the same as plain dicts."""
    rows: list[dict[str, Any]] = [
        {
            "input_ids": torch.arange(n) + 10 * i,
            "position_ids": torch.arange(3 * n).reshape(3, n) + 10 * i,
            "hidden": torch.arange(2 * n).reshape(n, 2).float() + i,
            "reward": torch.tensor(float(i)),
            "grid": torch.tensor([i, i + 1, i + 2]),
            "text": f"text {i}",
            "messages": [{"role": "user", "content": str(i)}] * (i % 3),
            "tools": None if i % 2 else {"name": i},
            "nested": {"x": torch.arange(n).float(), "label": i},
        }
        for i, n in enumerate(lengths)
    ]
    dims = {"hidden": 0}

    def column(name: str, values: list[Any]) -> Any:
        if name == "nested":
            return TensorDict({k: column(k, [v[k] for v in values]) for k in ("x", "label")}, batch_size=[len(values)])
        if not isinstance(values[0], torch.Tensor):
            return NonTensorStack(*[NonTensorData(v) for v in values])
        if name in ("reward", "grid"):
            return torch.stack(values)
        return jagged(values, dims.get(name, -1))

    return TensorDict({k: column(k, [r[k] for r in rows]) for k in rows[0]}, batch_size=[len(rows)]), rows


def assert_samples(batch: TensorDict, rows: list[dict[str, Any]]) -> None:
    assert batch.batch_size == (len(rows),)
    for sample, row in zip(unbind(batch), rows, strict=True):
        assert set(sample.keys()) == set(row)
        for key, value in row.items():
            if key == "nested":
                assert torch.equal(sample["nested", "x"], value["x"])
                assert sample["nested", "label"] == value["label"]
            elif isinstance(value, torch.Tensor):
                assert torch.equal(sample[key], value)
            else:
                assert sample[key] == value


LENGTHS = [[3, 1, 4, 1, 5], [3, 3], [4], [1], [1, 1, 1], [2, 2, 3]]


@pytest.mark.parametrize("journey", DICT_JOURNEYS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_batches_of_everything(lengths: list[int], journey: str) -> None:
    batch, rows = batch_of(lengths)
    batch = DICT_JOURNEYS[journey](batch)
    assert_samples(batch, rows)
    for count in (1, 2, 3, len(rows) + 1):
        pieces = chunk(batch, count)
        assert [num_samples(p) for p in pieces] == [num_samples(p) for p in chunk(torch.zeros(len(rows)), count)]
        start = 0
        for piece in pieces:
            assert_samples(piece, rows[start : start + num_samples(piece)])
            start += num_samples(piece)
        assert_samples(concat([DICT_JOURNEYS[journey](p) for p in pieces]), rows)
    order = [*reversed(range(len(rows))), 0]
    assert_samples(index_select(batch, order), [rows[i] for i in order])
    assert_samples(index_select(batch, []), [])
    assert_samples(concat([batch, split(batch, 1)[0]]), [*rows, rows[0]])


def test_batches_padded_and_back() -> None:
    batch, rows = batch_of([3, 1, 2])
    dense = to_padded(batch, {"input_ids": 99}, length=4)
    assert dense["input_ids"].tolist() == [[0, 1, 2, 99], [10, 99, 99, 99], [20, 21, 99, 99]]
    assert dense["position_ids"].shape == (3, 3, 4)
    assert dense["position_ids"][1, :, 1:].eq(0).all()
    assert torch.equal(dense["grid"], batch["grid"])
    back = from_padded(dense, [3, 1, 2])
    assert_same(unbind(back["input_ids"]), [r["input_ids"] for r in rows])
    assert_same(unbind(back["position_ids"]), [r["position_ids"] for r in rows])
    assert back["hidden"].shape == (3, 4, 2)  # not a key of the schema: named, it is cut as well
    assert_same(unbind(from_padded(dense, [3, 1, 2], 0, keys=["hidden"])["hidden"]), [r["hidden"] for r in rows])


def test_shared_values_become_one_a_sample() -> None:
    x = TensorDict({"a": torch.zeros(3), "note": NonTensorData("same", batch_size=[3])}, batch_size=[3])
    assert list(index_select(x, [0, 2])["note"]) == ["same", "same"]
    assert list(concat([x, x])["note"]) == ["same"] * 6


def test_shards_of_equal_and_of_different_lengths_go_together() -> None:
    # What workers return: one shard whose lengths happen to be equal, laid out by torch, and one whose are not.
    equal = torch.nested.as_nested_tensor([torch.zeros(3, 4), torch.ones(3, 4)], layout=torch.jagged)
    other = jagged([torch.zeros(3, 2), torch.ones(3, 5)])
    for parts in ([equal, other], [other, equal]):
        batches = [TensorDict({"position_ids": p}, batch_size=[2]) for p in parts]
        joined = concat(batches)["position_ids"]
        assert ragged_dim(joined) == 1
        assert sorted(s.shape[1] for s in unbind(joined)) == [2, 4, 4, 5]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 4))
def test_dense_tensors(values: list[int], count: int) -> None:
    x = torch.tensor(values)
    assert [p.tolist() for p in chunk(x, count)] == [p.tolist() for p in torch.tensor_split(x, count)]
    assert concat(chunk(x, count)).tolist() == values
    assert [int(v) for v in unbind(x)] == values
    assert to_padded(x) is x


def td(**values: Any) -> TensorDict:
    return TensorDict(values, batch_size=[2])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: chunk(torch.zeros(3), 0), "chunks must be a positive integer"),
        (lambda: split(torch.zeros(3), [1, 1]), "sizes add up to 2, the batch has 3 samples"),
        (lambda: split(torch.zeros(3), [4, -1]), r"sizes\[1\] must be at least 0"),
        (lambda: split(torch.zeros(3), 0), "sizes must be a positive integer"),
        (lambda: index_select(torch.zeros(3), [0, 3]), r"indices\[1\] = 3 is out of range for 3 samples"),
        (lambda: index_select(torch.zeros(3), [-1]), r"indices\[0\] must be at least 0"),
        (lambda: index_select(torch.zeros(3), torch.ones(3).bool()), "turn a mask into indices"),
        (lambda: index_select(torch.zeros(3), [0.0]), r"indices\[0\] must be an integer"),
        (lambda: concat([]), "at least one batch"),
        (lambda: concat([td(a=torch.zeros(2)), torch.zeros(2)]), "batch 1 is a dense tensor, batch 0 is a TensorDict"),
        (lambda: concat([torch.zeros(2), td(a=torch.zeros(2))]), "input 1 is a TensorDict, input 0 is a dense tensor"),
        (
            lambda: concat([torch.zeros(1), jagged([torch.zeros(1)])]),
            "input 1 is a jagged NestedTensor, input 0 is a dense",
        ),
        (lambda: concat([torch.zeros(1), torch.zeros(1).int()]), "input 1 is torch.int32, input 0 is torch.float32"),
        (
            lambda: concat([td(a=torch.zeros(2)), td(b=torch.zeros(2))]),
            r"batch 1 and batch 0 disagree on the keys \['a', 'b'\]",
        ),
        (lambda: concat([td(a=torch.zeros(2)), td(a=torch.zeros(2).int())]), "key 'a' cannot be concatenated"),
        (lambda: concat([td(a=torch.zeros(2, 3)), td(a=torch.zeros(2, 4))]), "key 'a' cannot be concatenated"),
        (lambda: concat([td(a=torch.zeros(2)), td(a=NonTensorStack("x", "y"))]), "key 'a' cannot be concatenated"),
        (lambda: unbind(TensorDict({}, batch_size=[])), r"batch_size \[B\], got \[\]"),
        (lambda: chunk([1, 2], 2), "got list"),
        (lambda: chunk("ab", 2), "got str"),
        (lambda: chunk(torch.tensor(1), 2), "a scalar tensor has no samples"),
        (lambda: to_padded(jagged([torch.zeros(1)]), {"a": 0}), "needs a TensorDict"),
        (lambda: to_padded(td(a=torch.zeros(2)), {"b": 0}), r"does not have: \['b'\]"),
        (lambda: from_padded(torch.zeros(2, 3), [1, 1], keys=["a"]), "keys needs a TensorDict"),
        (lambda: from_padded(td(a=torch.zeros(2, 3)), [1, 1], keys=["b"]), r"does not have: \['b'\]"),
        (lambda: from_padded(jagged([torch.zeros(1)]), [1]), "takes a dense tensor"),
    ],
)
def test_bad_input_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()

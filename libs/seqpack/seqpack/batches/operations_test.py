"""Every operation against plain lists of tensors, over ranks, ragged dimensions, lengths and ways of travel."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from seqpack.batches.batch import make_batch
from seqpack.batches.jagged import jagged, ragged_dim
from seqpack.batches.operations import chunk, concat, from_padded, index_select, split, to_padded, unbind
from seqpack.testing.batch_properties import (
    BATCH_TRANSFERS,
    LENGTHS,
    check_batches_of_everything,
    check_batches_padded_and_back,
)
from seqpack.testing.operation_properties import PROPERTIES


@pytest.mark.parametrize("law", PROPERTIES)
@given(st.data())
def test_law(law: str, data: st.DataObject) -> None:
    PROPERTIES[law](data, "cpu")


@pytest.mark.parametrize("transfer", BATCH_TRANSFERS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_batches_of_everything(lengths: list[int], transfer: str) -> None:
    check_batches_of_everything(lengths, transfer)


def test_batches_padded_and_back() -> None:
    check_batches_padded_and_back()


METADATA = [0.7, 3, "text", None, True, {"a": [1]}, ["x"], (1, 2), torch.ones(2).numpy()]


@pytest.mark.parametrize("value", METADATA, ids=str)
def test_metadata_of_the_batch_stays_what_it_is(value: Any) -> None:
    x = TensorDict({"a": torch.arange(3), "nested": TensorDict({"b": torch.arange(3)}, [3])}, batch_size=[3])
    x.set_non_tensor("note", value)
    x["nested"].set_non_tensor("deep", value)
    whole = [concat(chunk(x, 2)), index_select(x, [2, 0]), from_padded(to_padded(x), [1, 1, 1])]
    for part, theirs in [*zip(chunk(x, 2), x.split([2, 1]), strict=True), *((y, x) for y in [*split(x, 1), *whole])]:
        for ours, expected in ((part["note"], theirs["note"]), (part["nested"]["deep"], theirs["nested"]["deep"])):
            assert type(ours) is type(expected) is type(value)
            assert np.array_equal(ours, value) if isinstance(value, np.ndarray) else ours == value
    for one in unbind(x):
        assert type(one["note"]) is type(value)
    again = concat([pickle.loads(pickle.dumps(piece)) for piece in chunk(x, 3)])
    if isinstance(value, np.ndarray):  # copies of an array do not compare to one truth value: one for each sample
        assert [item.tolist() for item in again["note"]] == [value.tolist()] * 3
    else:
        assert again["note"] == value


def test_metadata_that_differs_becomes_one_value_a_sample() -> None:
    x, y = td(a=torch.zeros(2)), td(a=torch.zeros(2))
    x.set_non_tensor("note", "left")
    y.set_non_tensor("note", "right")
    assert list(concat([x, y])["note"]) == ["left", "left", "right", "right"]
    assert list(concat([concat([x, y]), x])["note"]) == ["left", "left", "right", "right", "left", "left"]
    y.set("note", NonTensorStack("a", "b"))
    assert list(concat([x, y])["note"]) == ["left", "left", "a", "b"]


@pytest.mark.parametrize("lengths", [[4, 4], [3, 3, 3], [4], [1], [2, 5]])
def test_padding_goes_by_tokens_whatever_dimension_torch_chose(lengths: list[int]) -> None:
    count = len(lengths)
    rows = [torch.arange(3 * n).view(3, n) + 100 * n for n in lengths]
    features = [torch.rand(2, n) for n in lengths]
    built = {"input_ids": [torch.arange(n) for n in lengths], "position_ids": rows, "features": features}
    nested = {k: torch.nested.as_nested_tensor(v, layout=torch.jagged) for k, v in built.items()}
    inner = TensorDict({"position_ids": nested["position_ids"]}, count)
    batch = TensorDict({**nested, "inner": inner}, count)
    dense = to_padded(batch, length=9)
    for padded in (dense["position_ids"], dense["inner", "position_ids"]):
        assert padded.shape == (count, 3, 9)
        assert all(torch.equal(padded[i, :, :n], rows[i]) for i, n in enumerate(lengths))
    assert dense["features"].shape == (count, 2, 9)
    back = from_padded(dense, batch)
    assert all(torch.equal(a, b) for a, b in zip(unbind(back["position_ids"]), rows, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(unbind(back["features"]), features, strict=True))


def test_media_are_padded_and_cut_by_lengths_of_their_own() -> None:
    media = [torch.rand(n, 5) for n in (2, 0, 4)]
    batch = make_batch([{"input_ids": [1] * n, "pixel_values": x} for n, x in zip((3, 1, 2), media, strict=True)])
    dense = to_padded(batch)
    assert dense["pixel_values"].shape == (3, 4, 5)
    assert all(torch.equal(a, b) for a, b in zip(unbind(from_padded(dense, batch)["pixel_values"]), media, strict=True))


def test_shards_of_equal_and_of_different_lengths_go_together() -> None:
    # What workers return: one shard whose lengths happen to be equal, laid out by torch, and one whose are not.
    equal = torch.nested.as_nested_tensor([torch.zeros(3, 4), torch.ones(3, 4)], layout=torch.jagged)
    other = jagged([torch.zeros(3, 2), torch.ones(3, 5)])
    for parts in ([equal, other], [other, equal]):
        batches = [TensorDict({"position_ids": p}, batch_size=[2]) for p in parts]
        joined = concat(batches)["position_ids"]
        assert ragged_dim(joined) == 1
        assert sorted(s.shape[1] for s in unbind(joined)) == [2, 4, 4, 5]


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
        (lambda: index_select(torch.zeros(3), [0.0]), r"indices\[0\] must be an integer"),  # type: ignore[list-item]
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
        (lambda: from_padded(torch.zeros(2, 3), [1, 1], keys=["a"]), "need a TensorDict to cut"),
        (lambda: from_padded(torch.zeros(2, 3), td(a=torch.zeros(2))), "need a TensorDict to cut"),
        (lambda: from_padded(td(a=torch.zeros(2)), td(a=torch.zeros(2)), keys=["a"]), "no effect beside a batch"),
        (
            lambda: from_padded(td(input_ids=torch.zeros(2, 3), x=torch.zeros(2, 3, 4)), [1, 2]),
            "x is as wide as the 3 padded tokens, but not a key of the schema",
        ),
        (lambda: from_padded(td(a=torch.zeros(2, 3)), [1, 1], keys=["b"]), r"does not have: \['b'\]"),
        (lambda: from_padded(jagged([torch.zeros(1)]), [1]), "takes a dense tensor"),
    ],
)
def test_bad_input_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()

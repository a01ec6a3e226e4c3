"""Every operation against plain lists of tensors, over ranks, ragged dimensions, lengths and ways of travel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from seqpack.batches.algebra import chunk, concat, from_padded, index_select, split, to_padded, unbind
from seqpack.batches.jagged import jagged, ragged_dim
from seqpack.testing.algebra_laws import LAWS
from seqpack.testing.batch_laws import (
    BATCH_JOURNEYS,
    LENGTHS,
    check_batches_of_everything,
    check_batches_padded_and_back,
)


@pytest.mark.parametrize("law", LAWS)
@given(st.data())
def test_law(law: str, data: st.DataObject) -> None:
    LAWS[law](data, "cpu")


@pytest.mark.parametrize("journey", BATCH_JOURNEYS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_batches_of_everything(lengths: list[int], journey: str) -> None:
    check_batches_of_everything(lengths, journey)


def test_batches_padded_and_back() -> None:
    check_batches_padded_and_back()


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

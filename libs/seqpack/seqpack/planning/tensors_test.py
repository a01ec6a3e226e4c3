"""Lengths may be a tensor; the tests of planning itself need no torch."""

import pytest
import torch

from seqpack.planning.micro_batches import plan_micro_batches
from seqpack.planning.packing import pack


def test_tensors_give_the_plans_of_their_numbers() -> None:
    lengths = [11, 3, 40, 17, 25, 8, 8, 31]
    assert pack(torch.tensor(lengths), 64) == pack(lengths, 64)
    assert pack(torch.tensor(lengths, dtype=torch.int32), 64).to_json() == pack(lengths, 64).to_json()
    assert plan_micro_batches(torch.tensor(lengths), 64, 2) == plan_micro_batches(lengths, 64, 2)
    assert plan_micro_batches(torch.tensor([4, 4]), 8, groups=torch.tensor([3, 3])).ranks == (((0, 1),),)


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        (torch.tensor([[3]]), r"lengths\[0\] must be an integer, got \[3\]"),
        (torch.tensor([3.0]), r"lengths\[0\] must be an integer, got 3.0"),
        (torch.tensor(3), "lengths must be a sequence of numbers, got int"),
    ],
)
def test_bad_tensors_are_named(lengths: torch.Tensor, words: str) -> None:
    for plan in (pack, plan_micro_batches):
        with pytest.raises(ValueError, match=words):
            plan(lengths, 8)

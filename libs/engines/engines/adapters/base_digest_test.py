"""The digest of a base tells models apart by one bit, by places and by names, and not by their adapters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from engines.adapters.base_digest import base_digest, sum_of_bits

Change = Callable[[Any], object]


class Base(nn.Module):
    """A matrix, a scalar and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.arange(12.0).view(4, 3))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.lora_A = nn.Parameter(torch.ones(2, 3))


def digest(change: Change | None = None) -> list[Any]:
    model = Base()
    if change is not None:
        with torch.no_grad():
            change(model)
    return base_digest(model).tolist()


def one_bit(model: Any) -> None:
    model.matrix.view(torch.int32)[3, 2] ^= 1


def swapped(model: Any) -> None:
    model.matrix[[0, 1]] = model.matrix[[1, 0]]


def a_scalar(model: Any) -> None:
    model.scalar.neg_()


def another_dtype(model: Any) -> None:
    model.matrix.data = model.matrix.data.bfloat16()


def another_shape(model: Any) -> None:
    model.matrix.data = model.matrix.data.view(3, 4)


def another_name(model: Any) -> None:
    model.other = model.matrix
    del model.matrix


@pytest.mark.parametrize("change", [one_bit, swapped, a_scalar, another_dtype, another_shape, another_name])
def test_another_base_has_another_digest(change: Change) -> None:
    assert digest() == digest()
    assert digest(change) != digest()


def test_the_adapter_does_not_matter() -> None:
    assert digest(lambda model: model.lora_A.zero_()) == digest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_sums_of_boxes_add_up(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """However a tensor is cut, along any dimension, and whatever is looked at in one go."""
    values = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)).mul(1000).to(dtype)
    bits = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]).flatten().tolist()
    want = sum((2 * place + 1) * one for place, one in enumerate(bits))
    for piece in (1, 7, 1 << 22):
        monkeypatch.setattr("engines.adapters.base_digest._PIECE", piece)
        boxes = [((0, 0, 0), (4, 1, 5)), ((0, 1, 0), (3, 2, 2)), ((0, 1, 2), (3, 2, 3)), ((3, 1, 0), (1, 2, 5))]
        sums = [
            sum_of_bits(values[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))], start, values.shape)
            for start, size in boxes
        ]
        assert (int(sum(sums)) - want) % 2**64 == 0
    assert int(sum_of_bits(values[:0], (0, 0, 0), values.shape)) == 0

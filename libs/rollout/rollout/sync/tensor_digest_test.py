"""Digests of tensors: each bit counts, in whole rows and in what is left over, and so does its place in a row."""

import pytest
import torch

from rollout.sync.tensor_digest import digest_of, digests_of


@pytest.mark.parametrize("count", [0, 1, 5, 4096, 4097, 20_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_every_bit_counts(count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(count).mul(100).to(dtype)
    assert digest_of(tensor) == digest_of(tensor.clone())
    for place in {0, count // 3, count - 1} & set(range(count)):
        other = tensor.clone()
        other.view(torch.uint8)[place * dtype.itemsize] ^= 1
        assert digest_of(other) != digest_of(tensor)


def test_elements_that_change_places_count() -> None:
    tensor = torch.arange(20_000.0)
    assert digest_of(tensor.flip(0)) != digest_of(tensor)
    swapped = tensor.clone()
    swapped[[3, 5]] = tensor[[5, 3]]
    assert digest_of(swapped) != digest_of(tensor)


def test_many_at_once_have_the_digests_of_each() -> None:
    torch.manual_seed(0)
    kinds = (torch.bfloat16, torch.float32)
    tensors = [torch.randn(count).to(dtype) for count in (0, 3, 4096, 9001, 20_000) for dtype in kinds]
    assert digests_of(tensors) == [digest_of(tensor) for tensor in tensors]
    assert digests_of([]) == []
    assert len(set(digests_of(tensors[2:]))) == len(tensors) - 2

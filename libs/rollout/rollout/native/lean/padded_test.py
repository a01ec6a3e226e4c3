"""Prompts padded to a few lengths: each attends to itself, whatever stands beside it."""

import pytest
import torch

from rollout.native.lean.padded import Padded
from seqpack.ops import attention


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("lengths", [(5,), (1, 1), (7, 64, 1, 33, 40, 90, 64), (3, 200), (30, 20, 10)])
def test_is_the_attention_of_each_prompt(lengths: tuple[int, ...], heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    total, (many, few) = sum(lengths), heads
    q, k, v = (torch.randn(total, n, 16, dtype=torch.float64) for n in (many, few, few))
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    expected = attention(q, k, v, bounds, 0.3, backend="naive")
    torch.testing.assert_close(Padded(lengths).attend(q, k, v, 0.3), expected, rtol=0, atol=1e-12)

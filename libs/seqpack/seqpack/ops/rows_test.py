from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqpack.ops.rows import by_rows

LENGTHS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 70)), min_size=1, max_size=6).filter(any)


def edges(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


class Causal(torch.nn.Module):
    """A recurrence with another width at its end: [n, L, 3] -> [n, L, 5]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixed = torch.nn.LSTM(3, 5, batch_first=True, dtype=torch.float64)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.mixed(rows)[0]
        return out


@settings(max_examples=25, deadline=None)
@given(LENGTHS)
def test_padded_rows_equal_one_sequence_at_a_time(lengths: list[int]) -> None:
    layer, results = Causal(), []
    x = torch.randn(sum(lengths), 3, dtype=torch.float64, requires_grad=True)
    for got in (
        by_rows(layer, x, edges(lengths)),
        by_rows(layer, x, edges(lengths), backend="naive"),
        torch.cat([layer(part[None])[0] if len(part) else part.new_zeros(0, 5) for part in x.split(lengths)]),
    ):
        weights = torch.arange(got.numel(), dtype=got.dtype).reshape(got.shape).cos()
        wanted = (x, *layer.parameters())
        results.append((got, *torch.autograd.grad((got * weights).sum(), wanted, allow_unused=True)))
    for result in results[:2]:
        for a, b in zip(result, results[2], strict=True):
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-10, atol=1e-10)


def test_no_tokens_stay_connected_to_the_weights() -> None:
    layer = Causal()
    got = by_rows(layer, torch.zeros(0, 3, dtype=torch.float64), edges([0, 0]))
    assert got.shape == (0, 5)
    assert all(grad is not None for grad in torch.autograd.grad(got.sum(), list(layer.parameters())))


def test_boundaries_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="cu_seqlens ends at 4"):
        by_rows(Causal(), torch.zeros(3, 3, dtype=torch.float64), edges([4]))

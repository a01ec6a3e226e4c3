"""The update against torch.optim.AdamW, and split weights against the float32 they stand for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.fast.adamw import AdamW, control, join, split, update

BETAS, EPS = (0.9, 0.98), 1e-8


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False), min_size=1, max_size=50)
)
@settings(max_examples=100, deadline=None)
def test_two_parts_are_the_float32_to_one_unit_in_the_last_place(values: list[float]) -> None:
    weight = torch.tensor(values, dtype=torch.float32)
    high, rest = split(weight)
    assert torch.equal(high, weight.to(torch.bfloat16))
    if bool(high.isfinite().all()):
        assert int((join(high, rest).view(torch.int32) - weight.view(torch.int32)).abs().max()) <= 1


def test_two_parts_are_the_float32_bit_for_bit_but_at_halves() -> None:
    weight = randn(100_000)
    moved = join(*split(weight)).view(torch.int32) != weight.view(torch.int32)
    assert bool((weight[moved].view(torch.int32) & 0xFFFF == 0x8000).all())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_equals_torch(weight_decay: float, limit: float | None) -> None:
    start = randn(40, 30)
    expected = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([expected], lr=1e-2, betas=BETAS, eps=EPS, weight_decay=weight_decay)
    whole, (high, rest) = start.clone(), split(start)
    moments = [(torch.zeros_like(start), torch.zeros_like(start)) for _ in range(2)]
    for step in range(1, 6):
        grad = randn(40, 30, seed=step)
        controls = control(grad.norm(), limit, torch.tensor(float(step), dtype=torch.float64), BETAS)
        expected.grad = grad.clone()
        if limit is not None:
            torch.nn.utils.clip_grad_norm_([expected], limit)
        optimizer.step()
        update(whole, None, moments[0], grad, controls, AdamW(1e-2, BETAS, EPS), weight_decay)
        update(high, rest, moments[1], grad, controls, AdamW(1e-2, BETAS, EPS), weight_decay)
    torch.testing.assert_close(whole, expected.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(join(high, rest), expected.detach(), rtol=0, atol=1e-6)
    assert torch.equal(high, join(high, rest).to(torch.bfloat16))


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_changes_nothing(norm: float) -> None:
    high, rest = split(randn(9))
    moments = (randn(9, seed=1), randn(9, seed=2).abs())
    before = [x.clone() for x in (high, rest, *moments)]
    controls = control(torch.tensor(norm), 1.0, torch.tensor(1.0, dtype=torch.float64), BETAS)
    update(high, rest, moments, randn(9, seed=3), controls, AdamW(1e-2, BETAS, EPS), 0.1)
    assert all(torch.equal(one, other) for one, other in zip((high, rest, *moments), before, strict=True))


def test_the_factor_clips_alone() -> None:
    def factor(norm: float, limit: float | None) -> float:
        return control(torch.tensor(norm), limit, torch.tensor(3.0, dtype=torch.float64), BETAS)[0].item()

    assert [factor(4.0, 1.0), factor(0.5, 1.0), factor(0.0, 1.0), factor(4.0, None)] == [0.25, 1.0, 1.0, 1.0]

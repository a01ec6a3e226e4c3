"""Norms of rows against their formulas in float64, gradients too, whatever the blocks."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqpack.ops import norms
from seqpack.ops.norms import rms_norm, unit_rows
from seqpack.ops.scatter_gather import row_blocks

EPS = 1e-2
"""Large, so that a wrong place for it shows."""


def unit_formula(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + EPS).sqrt() * factor


def rms_formula(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@pytest.fixture(params=[1 << 18, 1], ids=["one block", "blocks of 16 rows"], autouse=True)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "row_blocks", partial(row_blocks, numbers=request.param))


@pytest.mark.parametrize("shape", [(1, 5), (37, 5), (7, 11, 6), (0, 3)])
def test_values_and_gradients(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, towards = (torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(shape[-1], generator=generator, dtype=torch.float64).requires_grad_()
    x.requires_grad_()
    for own, formula, given_tensors in (
        (rms_norm(x, weight, EPS), rms_formula(x, weight), [x, weight]),
        (unit_rows(x, EPS, 0.3), unit_formula(x, 0.3), [x]),
    ):
        torch.testing.assert_close(own, formula, rtol=1e-12, atol=1e-12)
        found, wanted = (torch.autograd.grad((y * towards).sum(), given_tensors) for y in (own, formula))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.floats(-6, 6))
def test_float32_is_as_near_to_float64_as_the_formula(rows: int, size: int, magnitude: float) -> None:
    generator = torch.Generator().manual_seed(rows * 10 + size)
    exact = torch.randn(rows, size, generator=generator, dtype=torch.float64) * 10**magnitude
    weight, towards = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((size,), (rows, size)))

    def result(function: object, dtype: torch.dtype) -> list[torch.Tensor]:
        x, w = exact.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_()
        y = function(x, w)  # type: ignore[operator]
        return [y.detach().double(), *(g.double() for g in torch.autograd.grad((y * towards.to(dtype)).sum(), [x, w]))]

    wanted = result(rms_formula, torch.float64)
    own, plain = result(lambda x, w: rms_norm(x, w, EPS), torch.float32), result(rms_formula, torch.float32)
    roots = (exact.square().mean(-1, keepdim=True) + EPS).sqrt()
    terms = [torch.ones(1), towards * weight / roots, (towards * exact / roots).abs().sum(0)]  # of what cancels
    for a, b, true, term in zip(own, plain, wanted, terms, strict=True):
        allowed = 2 * (b - true).abs().max() + 4e-7 * torch.cat([term.flatten(), true.flatten()]).abs().max()
        assert (a - true).abs().max() <= allowed


def test_a_row_changes_no_other() -> None:
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    broken = x.clone()
    broken[20] = float("nan")
    weight = torch.ones(8, dtype=torch.float64)
    same = torch.arange(40) != 20
    assert torch.equal(rms_norm(x, weight, EPS)[same], rms_norm(broken, weight, EPS)[same])
    results = []
    for given_rows in (x, broken):
        leaf = given_rows.clone().requires_grad_()
        results.append(torch.autograd.grad(unit_rows(leaf, EPS).sum(), leaf)[0][same])
    assert torch.equal(*results)

"""Norms by blocks of rows against the stock modules, of every family; other dtypes go through the stock code."""

from typing import Any

import pytest
import torch

from engines.devices.host_layers import use_host_norms
from engines.devices.layer_matching import CENTERED_NORMS, GATED_NORMS, NORMS
from engines.families.registry import family_of
from engines.proofs.family_cases import CASES, Case


def normed(model: Any) -> list[Any]:
    return [m for m in model.modules() if type(m).__name__ in (*NORMS, *CENTERED_NORMS, *GATED_NORMS)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_norm_of_every_family(case: Case) -> None:
    stock, own = case.model(), case.model()
    generator = torch.Generator().manual_seed(1)
    assert use_host_norms(own).changed, family_of(own.config).name
    for left, right in zip(normed(stock), normed(own), strict=True):
        x, gate, towards = (torch.randn(3, 7, left.weight.shape[0], generator=generator) for _ in range(3))
        results = []
        for module in (left, right):
            leaf, z = x.clone().requires_grad_(), gate.clone().requires_grad_()
            inputs = (leaf, z) if type(module).__name__ in GATED_NORMS else (leaf,)
            y = module(*inputs)
            grads = torch.autograd.grad((y * towards).sum(), [*inputs, module.weight])
            results.append([y, *grads])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-6)


def test_other_dtypes_are_the_stock_ones_and_undo_restores() -> None:
    model = CASES[0].model().bfloat16()
    kinds = [type(module) for module in model.modules()]
    module = next(module for module in normed(model) if type(module).__name__ in CENTERED_NORMS)
    x = torch.randn(5, module.weight.shape[0]).bfloat16()
    wanted = module(x)
    applied = use_host_norms(model)
    assert [type(module) for module in model.modules()] != kinds
    assert torch.equal(module(x), wanted)
    assert use_host_norms(model) is applied
    applied.undo()
    assert [type(module) for module in model.modules()] == kinds

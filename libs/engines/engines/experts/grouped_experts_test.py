"""Experts in grouped products against transformers' loop over experts: results and every gradient."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from engines.experts.grouped_experts import routed_experts, sorted_experts, sorted_pairs
from engines.experts.grouped_products import grouped_rows, grouped_rows_grad, grouped_weight_grad
from engines.private_api import set_experts

SIZES = st.tuples(st.integers(1, 7), st.integers(1, 9), st.sampled_from([(4, 4), (3, 5), (8, 16), (16, 4)]))


def stock(experts: int, hidden: int, inner: int, dtype: torch.dtype = torch.float64) -> Any:
    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inner, num_experts=experts, hidden_act="silu")
    set_experts(config, "eager")
    module = Qwen3MoeExperts(config).to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def results(module: Any, x: Tensor, experts: Tensor, top_scores: Tensor, plain: bool) -> tuple[Tensor, ...]:
    leaves = x.clone().requires_grad_(), top_scores.clone().requires_grad_(), *module.parameters()
    y = module(leaves[0], experts, leaves[1]) if plain else routed_experts(leaves[0], experts, *leaves[1:])
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return y.detach(), *torch.autograd.grad((y * weight).sum(), leaves)


def operands(tokens: int, number: int, each: int, hidden: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    used = torch.randperm(number, generator=rng)[: max(each, 1 + seed % number)]  # the others get no token
    experts = torch.stack([used[torch.randperm(len(used), generator=rng)[:each]] for _ in range(tokens)])
    x = torch.randn(tokens, hidden, generator=rng, dtype=dtype)
    return x, experts, torch.rand(tokens, each, generator=rng, dtype=dtype)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 10_000), each=st.integers(1, 4))
@example(sizes=(6, 1, (4, 4)), seed=0, each=1)  # one token
@example(sizes=(6, 9, (4, 4)), seed=6, each=1)  # all tokens to one expert
@example(sizes=(1, 5, (3, 5)), seed=0, each=1)  # one expert
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_they_are_those_of_the_loop(
    sizes: tuple[int, int, tuple[int, int]], seed: int, each: int, dtype: torch.dtype
) -> None:
    number, tokens, (hidden, inner) = sizes
    torch.manual_seed(seed)
    module = stock(number, hidden, inner, dtype)
    x, experts, top_scores = operands(tokens, number, min(each, number), hidden, seed, dtype)
    expected = results(module, x, experts, top_scores, plain=True)
    bound = 1e-11 if dtype == torch.float64 else 1e-4
    for got, wanted in zip(results(module, x, experts, top_scores, plain=False), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=bound, rtol=bound)


def test_their_gradients_are_those_of_differences() -> None:
    x, experts, top_scores = operands(5, 4, 2, 3, 1, torch.float64)
    weights = torch.randn(4, 4, 3, dtype=torch.float64), torch.randn(4, 3, 2, dtype=torch.float64)
    leaves = [one.requires_grad_() for one in (x, top_scores, *weights)]
    assert torch.autograd.gradcheck(lambda a, m, *w: routed_experts(a, experts, m, *w), leaves)


def test_bfloat16_is_as_exact_as_the_loop() -> None:
    torch.manual_seed(0)
    module = stock(8, 32, 16)
    x, experts, top_scores = operands(64, 8, 2, 32, 7, torch.float64)
    exact = results(module, x, experts, top_scores, plain=True)
    half = module.to(torch.bfloat16)
    narrow = (x.bfloat16(), experts, top_scores.bfloat16())
    loop, grouped = (results(half, *narrow, plain=plain) for plain in (True, False))
    for got, other, wanted in zip(grouped, loop, exact, strict=True):
        assert (got.double() - wanted).norm() <= 1.2 * (other.double() - wanted).norm() + 1e-3 * wanted.norm()


@pytest.mark.parametrize("rows", [(3, 0, 4), (0, 0, 7), (7, 0, 0), (0, 0, 0)])
def test_sorted_rows_with_weights(rows: tuple[int, ...]) -> None:
    """Rows that came from other ranks: none at all, or all to one expert."""
    torch.manual_seed(0)
    module = stock(3, 4, 6)
    experts = torch.arange(3).repeat_interleave(torch.tensor(rows))
    x, top_scores = torch.randn(sum(rows), 4, dtype=torch.float64), torch.rand(sum(rows), dtype=torch.float64)
    ends = torch.tensor(rows).cumsum(0).to(torch.int32)
    leaves = x.requires_grad_(), top_scores.requires_grad_(), *module.parameters()
    found = sorted_experts(leaves[0], leaves[1], leaves[2], leaves[3], ends)
    wanted = module(x, experts[:, None], top_scores[:, None])
    torch.testing.assert_close(found, wanted)
    some = torch.randn_like(found)
    own = torch.autograd.grad((found * some).sum(), leaves)
    touched = sum(0.0 * leaf.sum() for leaf in leaves)  # the loop over no expert has no graph
    stocks = torch.autograd.grad((wanted * some).sum() + touched, leaves)
    for got, other in zip(own, stocks, strict=True):
        torch.testing.assert_close(got, other)


def test_frozen_weights_get_no_gradient() -> None:
    x, experts, top_scores = operands(5, 4, 2, 4, 1, torch.float64)
    weights = torch.randn(4, 4, 4, dtype=torch.float64), torch.randn(4, 4, 2, dtype=torch.float64)
    routed_experts(x.requires_grad_(), experts, top_scores.requires_grad_(), *weights).sum().backward()
    assert x.grad is not None
    assert top_scores.grad is not None


def test_pairs_are_sorted_and_counted() -> None:
    pairs, ends = sorted_pairs(torch.tensor([[2, 0], [2, 3], [0, 2]]), 5)
    assert pairs.order.tolist() == [1, 4, 0, 2, 5, 3]
    assert pairs.place[pairs.order].tolist() == list(range(6))
    assert ends.tolist() == [2, 2, 5, 6, 6]


def test_operations_are_the_functions_and_have_the_shapes_that_a_compiler_is_told() -> None:
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    x, weight, grad = torch.randn(5, 4), torch.randn(3, 8, 4), torch.randn(5, 8)
    for function, arguments in (
        (grouped_rows, (x, weight, ends)),
        (grouped_rows_grad, (grad, weight, ends)),
        (grouped_weight_grad, (grad, x, ends)),
    ):
        operation = getattr(torch.ops.engines, function.__name__)
        torch.library.opcheck(operation.default, arguments, test_utils=("test_schema", "test_faketensor"))
        assert torch.equal(operation(*arguments), function(*arguments))

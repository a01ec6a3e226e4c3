"""Experts that ranks share, computed by functions, against the loop of transformers on one process."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engines.experts.placement import expert_modules, place_experts
from engines.fast.routed_layers import FunctionCalls, use_routed_functions
from engines.proofs.forked_ranks import launch_forked
from engines.tiny import tiny_model

TOKENS, TOP_K = 12, 2


def operands(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of a rank; those of the second go to the experts of the first alone."""
    rng = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, 32, generator=rng, dtype=torch.float64)
    experts = torch.rand(TOKENS, 4 if rank == 0 else 2, generator=rng).topk(TOP_K).indices
    return x, experts, torch.rand(TOKENS, TOP_K, generator=rng, dtype=torch.float64)


def results(module: Any, rank: int, **options: Any) -> list[Tensor]:
    x, experts, top_scores = operands(rank)
    leaves = x.requires_grad_(), top_scores.requires_grad_()
    y = module(leaves[0], experts, leaves[1], **options)
    y.square().sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def shared() -> tuple[list[Tensor], list[Tensor]]:
    """This rank's results, and the gradients of its experts."""
    model: Any = tiny_model("attention_moe", num_hidden_layers=1).double()
    use_routed_functions(model.model.layers[0])
    (module,), _ = place_experts(model, 2, "cpu")
    found = results(module, dist.get_rank(), run=FunctionCalls(None))
    gradients: list[Any] = [parameter.grad for parameter in module.parameters()]
    return found, [gradient.full_tensor() for gradient in gradients]


def whole() -> tuple[list[list[Tensor]], list[Tensor]]:
    model: Any = tiny_model("attention_moe", num_hidden_layers=1).double()
    model.set_experts_implementation("eager")
    (module,) = expert_modules(model)
    found = [results(module, rank) for rank in range(2)]
    return found, [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def test_ranks_that_share_experts_compute_them_as_one_process() -> None:
    expected, weights = whole()
    found, gradients = launch_forked(shared, (), 2)
    for got, wanted in zip(found, expected[0], strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)
    assert len(gradients) == len(weights) == 2
    for got, wanted in zip(gradients, weights, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)

"""Experts in grouped products on a GPU in bfloat16, against transformers' loop over experts in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from engines.experts.float32_logits import float32_logits
from engines.experts.grouped_experts import routed_experts
from engines.private_api import set_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EXPERTS, HIDDEN, INNER = 16, 256, 128


def stock() -> Any:
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, hidden_act="silu")
    set_experts(config, "eager")
    torch.manual_seed(0)
    module = Qwen3MoeExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return module.to("cuda", torch.bfloat16)


def results(module: Any, x: Tensor, experts: Tensor, top_scores: Tensor, grouped: bool) -> tuple[Tensor, ...]:
    leaves = x.clone().requires_grad_(), top_scores.clone().requires_grad_(), *module.parameters()
    y = routed_experts(leaves[0], experts, *leaves[1:]) if grouped else module(leaves[0], experts, leaves[1])
    weight = torch.linspace(-1, 1, y.numel(), device="cuda").to(y.dtype).view_as(y)
    return tuple(one.detach().double() for one in (y, *torch.autograd.grad((y * weight).sum(), leaves)))


@pytest.mark.parametrize(
    ("tokens", "each", "used"), [(700, 4, 16), (700, 4, 5), (33, 1, 1), (1, 1, 1), (1, 8, 16), (257, 2, 3)]
)
def test_they_are_as_exact_as_the_loop(tokens: int, each: int, used: int) -> None:
    """Experts without tokens, all tokens to one, a single token."""
    rng = torch.Generator().manual_seed(tokens)
    experts = torch.rand(tokens, used, generator=rng).topk(each).indices.cuda()
    x = torch.randn(tokens, HIDDEN, generator=rng).to("cuda", torch.bfloat16)
    top_scores = torch.rand(tokens, each, generator=rng).cuda()
    module = stock()
    found = results(module, x, experts, top_scores, grouped=True)
    loop = results(module, x, experts, top_scores.bfloat16(), grouped=False)
    exact = results(module.double(), x.double(), experts, top_scores.double(), grouped=False)
    for got, other, wanted in zip(found, loop, exact, strict=True):
        assert got.isfinite().all()
        few = 2**-7 if got.numel() < 16 else 1e-3  # a few numbers are a single draw of bfloat16's rounding
        assert (got - wanted).norm() <= 1.2 * (other - wanted).norm() + few * wanted.norm()
        assert torch.equal(got[wanted == 0], wanted[wanted == 0])  # of experts without tokens


def test_logits_are_not_rounded() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(n, HIDDEN, device="cuda").bfloat16().requires_grad_() for n in (300, EXPERTS))
    logits = float32_logits(x, weight)
    exact = x.double() @ weight.double().t()
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 1e-4
    assert (exact.bfloat16() - exact).abs().max() > 1e-2  # as stock has them
    some = torch.randn_like(logits)
    got = torch.autograd.grad((logits * some).sum(), (x, weight))
    wanted = torch.autograd.grad((exact * some).sum(), (x, weight))
    for one, other in zip(got, wanted, strict=True):
        assert (one - other).norm() < 0.01 * other.norm()

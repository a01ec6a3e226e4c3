"""Attention blocks: the plain version against the definition and its gradient by autograd."""

import pytest
import torch

from dyncp.ops.attention_kernels import plain_backward, plain_forward
from dyncp.sharding.layout import Block, Selection, make_block

CPU = torch.device("cpu")


def block_of(q_lengths: list[int], k_lengths: list[int], causal: bool, device: torch.device = CPU) -> Block:
    def spans(lengths: list[int]) -> list[list[tuple[int, int]]]:
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        return [[(start, n)] for start, n in zip(ends, lengths, strict=False)]

    return make_block(spans(q_lengths), spans(k_lengths), causal, device)


def tensors(q_tokens: int, k_tokens: int, heads: int = 4, kv: int = 2, dim: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(q_tokens)
    shapes = ((q_tokens, heads, dim), (k_tokens, kv, dim), (k_tokens, kv, dim), (q_tokens, heads, dim))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scale: float) -> torch.Tensor:
    outs = []
    for qs, ks, vs in zip(q.split(block.q_lengths), k.split(block.k_lengths), v.split(block.k_lengths), strict=True):
        repeat = qs.shape[1] // ks.shape[1]
        for h in range(qs.shape[1]):
            scores = qs[:, h] @ ks[:, h // repeat].T * scale
            if block.causal:
                hidden = torch.ones_like(scores, dtype=torch.bool).triu(len(ks) - len(qs) + 1)
                scores = scores.masked_fill(hidden, -torch.inf)
            outs.append(scores.softmax(-1) @ vs[:, h // repeat])
    rows = iter(outs)
    return torch.cat([torch.stack([next(rows) for _ in range(q.shape[1])], dim=1) for _ in block.q_lengths])


@pytest.mark.parametrize(("q_lengths", "k_lengths", "causal"), [([5, 1, 3], [5, 4, 9], True), ([2, 3], [7, 1], False)])
def test_plain_blocks_equal_the_definition_and_its_gradient(
    q_lengths: list[int], k_lengths: list[int], causal: bool
) -> None:
    block = block_of(q_lengths, k_lengths, causal)
    q, k, v, grad = tensors(sum(q_lengths), sum(k_lengths))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected = by_definition(q, k, v, block, 0.3)
    out, lse = plain_forward(q, k, v, block, 0.3)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    found = plain_backward(grad, q, k, v, out, lse, block, 0.3)
    for a, b in zip(found, torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_selections_take_and_add() -> None:
    x = torch.arange(6.0)[:, None]
    for selection in (Selection(1, 2, None), Selection(1, 2, torch.tensor([1, 2]))):
        assert selection.take(x).flatten().tolist() == [1, 2]
        target = torch.zeros(6, 1)
        selection.add_to(target, torch.ones(2, 1))
        assert target.flatten().tolist() == [0, 1, 1, 0, 0, 0]

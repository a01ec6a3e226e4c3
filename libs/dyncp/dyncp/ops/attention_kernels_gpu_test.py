"""Attention blocks on a GPU: torch's flash attention against the plain version in float64."""

import pytest
import torch

from dyncp.ops.attention_kernels import flash_backward, flash_forward, plain_backward, plain_forward
from dyncp.sharding.layout import Block, make_block


def block_of(q_lengths: list[int], k_lengths: list[int], causal: bool) -> Block:
    def spans(lengths: list[int]) -> list[list[tuple[int, int]]]:
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        return [[(start, n)] for start, n in zip(ends, lengths, strict=False)]

    return make_block(spans(q_lengths), spans(k_lengths), causal, torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv", "dim"), [(8, 2, 128), (8, 2, 256), (6, 6, 64)])
@pytest.mark.parametrize(
    ("q_lengths", "k_lengths", "causal"), [([700, 1, 64], [700, 900, 65], True), ([33, 500], [1000, 7], False)]
)
def test_flash_blocks_equal_plain_ones(
    heads: int, kv: int, dim: int, q_lengths: list[int], k_lengths: list[int], causal: bool
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    block = block_of(q_lengths, k_lengths, causal)
    tokens = ((sum(q_lengths), heads), (sum(k_lengths), kv), (sum(k_lengths), kv), (sum(q_lengths), heads))
    q, k, v, grad = (torch.randn(*shape, dim, device="cuda", dtype=torch.bfloat16) for shape in tokens)
    exact_q, exact_k, exact_v, exact_grad = (x.double() for x in (q, k, v, grad))
    out, lse = flash_forward(q, k, v, block, dim**-0.5)
    expected, expected_lse = plain_forward(exact_q, exact_k, exact_v, block, dim**-0.5)
    found = [out, lse, *flash_backward(grad, q, k, v, out, lse, block, dim**-0.5)]
    exact = exact_grad, exact_q, exact_k, exact_v, expected, expected_lse
    wanted = [expected, expected_lse, *plain_backward(*exact, block, dim**-0.5)]
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).norm() <= 1e-2 * b.norm()

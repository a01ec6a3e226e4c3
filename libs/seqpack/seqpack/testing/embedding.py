"""What the isolation check does at a model's input embedding: watch gradients that arrive, and add rounding noise."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def input_embedding(model: nn.Module) -> nn.Module | None:
    """Return the input embedding: the model's own statement, else its first `nn.Embedding`, else None."""
    find = getattr(model, "get_input_embeddings", None)
    return find() if find else next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)


@contextmanager
def watched(embedding: nn.Module) -> Iterator[list[Tensor]]:
    """Add a zero tensor with gradient to every output of the embedding; yield these tensors in the order of calls."""
    leaves: list[Tensor] = []

    def add(_: nn.Module, __: object, output: Tensor) -> Tensor:
        leaves.append(torch.zeros_like(output, requires_grad=True))
        return output + leaves[-1]

    handle = embedding.register_forward_hook(add)
    try:
        yield leaves
    finally:
        handle.remove()


@contextmanager
def perturbed_rounding(embedding: nn.Module, seed: int) -> Iterator[None]:
    """Change every number of the embedding's outputs by one unit in its last place, up or down at random."""
    generator = torch.Generator().manual_seed(seed)

    def move(_: nn.Module, __: object, output: Tensor) -> Tensor:
        signs = torch.randint(0, 2, output.shape, generator=generator).to(output.device) * 2 - 1
        return output * (1 + signs * torch.finfo(output.dtype).eps).to(output.dtype)

    handle = embedding.register_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()


def reach(losses: Sequence[Tensor], leaves: Sequence[Tensor], spans: Sequence[tuple[int, int]], total: int) -> Tensor:
    """Return [n, n] float64: the gradient norm of sequence i's loss at the embedded tokens of sequence j.

    The row may be embedded in one piece or in several in its order; otherwise (other sizes) all is zero.
    """
    norms = torch.zeros(len(losses), len(spans), dtype=torch.float64)
    for index, loss in enumerate(losses):
        partial = torch.autograd.grad(loss, list(leaves), retain_graph=True, allow_unused=True)
        grads = [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(partial, leaves, strict=True)]
        rows = torch.cat([grad.reshape(-1, grad.shape[-1]).double() for grad in grads])
        if len(rows) == total:
            for other, (start, length) in enumerate(spans):
                norms[index, other] = rows[start : start + length].norm()
    return norms

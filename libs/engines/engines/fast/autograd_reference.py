"""Gradients by autograd inside an operation, for the plain forms of operations."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


def grad_of(function: Callable[..., Tensor], operands: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of function(*operands) for the gradient `grad` of its result.

    Autograd is off in the thread that runs an operation, and cannot be switched on there: another thread computes them.
    """

    def work() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in operands]
            grads = torch.autograd.grad(function(*leaves), leaves, grad)
        return tuple(x.clone(memory_format=torch.contiguous_format) for x in grads)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()

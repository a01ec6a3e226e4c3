"""Moves of weights and moments between a device and host memory."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from engines.devices.host_copies import HostCopies
from engines.private_api import replace_tensors

Take = Callable[[Tensor], Tensor]
"""A function from a tensor to its copy after a move."""


def move_all(module: nn.Module, beside: Iterable[Tensor], device: torch.device, copies: HostCopies) -> Take:
    """Move a module's parameters and buffers; return a function from a tensor to its copy, for those `beside` too."""
    for one in module.modules():
        if isinstance(one, FSDPModule):
            one.reshard()  # the shards are its parameters then
    take = _moved([*module.parameters(), *module.buffers(), *beside], device, copies)
    with _cycles_freed():
        replace_tensors(module, take)
    return take


def move_moments(optimizer: torch.optim.Optimizer, take: Take) -> None:
    """Replace the states of an optimizer by their moved copies."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:  # steps are scalars, and stay
                state[key] = take(value)


def moments(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """Return the tensors of an optimizer's states that move."""
    states = (value for state in optimizer.state.values() for value in state.values())
    return (value for value in states if isinstance(value, Tensor) and value.ndim)


@contextmanager
def _cycles_freed() -> Iterator[None]:
    """Free reference cycles: torch keeps an exception of each DTensor's move, with its frames and their tensors.

    Objects made inside stay young, so that only the youngest generation is collected.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        if enabled:
            gc.enable()


def _moved(tensors: list[Tensor], device: torch.device, copies: HostCopies) -> Take:
    """Return a function from each tensor to its copy; it does not keep the tensors, whose memory is to be freed."""
    there = copies.moved(tensors, device)

    def take(tensor: Tensor) -> Tensor:
        moved = there.get(id(tensor))
        return tensor.to(device) if moved is None else moved

    return take

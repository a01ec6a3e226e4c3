"""What an executor keeps in memory between steps, in the memory ledger of its process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from seqpack.memory import ledger


@dataclass(frozen=True)
class StateTensors:
    """The tensors of an executor now: weights with buffers, gradients, optimizer states (with float32 values beside
    narrower weights), and the blocks of host memory that offloaded states go to."""

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor] = ()
    optimizer: Sequence[Tensor] = ()
    offload: Sequence[Tensor] = ()

    def kept(self, device: torch.device) -> list[Tensor]:
        """Return the weights and optimizer states on a device, which an offload keeps."""
        return [tensor for tensor in (*self.weights, *self.optimizer) if tensor.device == device]


class HasStates(Protocol):
    """An executor that says what it keeps."""

    trainable: bool

    @property
    def memory(self) -> StateTensors:
        """What it keeps now."""
        ...


def register_states(executor: HasStates) -> None:
    """Register what an executor keeps: a frozen one is a reference model, whole under that name."""
    if not executor.trainable:
        ledger.register(ledger.REFERENCE, executor, lambda it: [it.memory.weights, it.memory.offload])
        return
    held: dict[str, Callable[[Any], Any]] = {
        ledger.OFFLOAD: lambda it: it.memory.offload,
        ledger.WEIGHTS: lambda it: it.memory.weights,
        ledger.GRADIENTS: lambda it: it.memory.gradients,
        ledger.OPTIMIZER: lambda it: it.memory.optimizer,
    }
    for name, function in held.items():
        ledger.register(name, executor, function)

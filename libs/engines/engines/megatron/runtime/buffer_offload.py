"""The offload of Megatron's buffers: their memory is freed, and allocated again on return.

megatron-core keeps weights, gradients and their views (parameters, `main_grad`, buckets, shards) on a few storages.
Moving a tensor would leave its views behind. So the storages themselves are emptied, and refilled later: every view
stays valid, whoever has it, and nothing depends on which tensors a buffer holds.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from engines.devices.detect import devices_of
from engines.devices.host_copies import HostCopies


class Moved:
    """The storages that are offloaded at the moment."""

    def __init__(self) -> None:
        self.host = HostCopies()
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._forgotten: list[tuple[torch.UntypedStorage, int]] = []

    def offload(self, kept: Iterable[Tensor], dropped: Iterable[Tensor]) -> None:
        """Free these tensors' memory: the bytes of `kept` are copied to the host, those of `dropped` are lost.

        Nothing may touch them until they are back.
        """
        for storage in _storages(dropped):
            self._forgotten.append((storage, storage.nbytes()))
            storage.resize_(0)
        storages = _storages(kept)
        self._kept = list(zip(storages, self.host.of([_bytes(storage) for storage in storages]), strict=True))
        for storage in storages:
            storage.resize_(0)

    def back(self) -> None:
        """Restore all storages; forgotten ones are zero."""
        for storage, content in self._kept:
            storage.resize_(content.nbytes)
            _bytes(storage).copy_(content, non_blocking=True)
        for storage, size in self._forgotten:
            storage.resize_(size)
            _bytes(storage).zero_()
        if self._kept and (device := self._kept[0][0].device).type != "cpu":
            devices_of(device).current_stream().synchronize()
        self._kept, self._forgotten = [], []


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages that have memory, each once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage
    return list(storages.values())

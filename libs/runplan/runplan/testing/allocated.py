"""For tests: count the bytes that operations allocate."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from runplan.private_api import TorchDispatchMode, address, tree_leaves


class Allocated(TorchDispatchMode):
    """Bytes of the storages that operations made since and that are alive; `most` of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        every = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]  # no proxies
        local = [t.to_local() if isinstance(t, DTensor) else t for t in every]
        self.before = [t.untyped_storage() for t in local if t.device.type == "cpu"]  # their addresses stay taken
        self.seen = {address(storage) for storage in self.before}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = address(storage)
        if key in self.seen:
            return
        self.seen.add(key)
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size

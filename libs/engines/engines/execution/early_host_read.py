"""Values that the host reads as soon as they are computed, whatever work the device was given after them."""

import torch
from torch import Tensor


class EarlyRead:
    """A tensor on its way to the host. On CUDA it is copied now, in the stream's order, and reading it waits for that
    copy alone; elsewhere it is read as any tensor."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.detach()
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values.detach(), non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> Tensor:
        """Return the values in host memory."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.cpu()

    def __float__(self) -> float:
        """Return the one value."""
        return float(self.read())

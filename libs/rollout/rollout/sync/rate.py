"""The bandwidth of the link for weights: memory, of the host or of a device."""

import functools
import time

import torch


@functools.lru_cache(maxsize=16)
def copy_rate(nbytes: int, device: torch.device) -> float:
    """Measure, once, the bytes a second at which this host copies memory, or a device its own: the link's rate."""
    most = 1 << 28 if device.type == "cpu" else 1 << 26  # a device may have little free memory
    source = torch.ones(min(max(nbytes, 1 << 24), most), dtype=torch.uint8, device=device)
    goal = torch.zeros_like(source)
    _wait(device)
    start = time.perf_counter()
    goal.copy_(source)
    _wait(device)
    return source.numel() / (time.perf_counter() - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

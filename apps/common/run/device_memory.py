"""The device memory of a step, for a run's metrics."""

import torch

from engines.devices.detect import devices_of
from schedules.runtime.collectives import gather_lists

GIB = 2**30


def memory_metrics(device: str | torch.device) -> dict[str, float]:
    """Return the GiB of the fullest rank since the last call; nothing on a CPU. Collective."""
    devices = devices_of(device)
    figures = devices.memory()
    if figures is None:
        return {}
    devices.reset_peak()
    peaks = gather_lists([(figures.peak, figures.allocated, figures.total)])
    peak, allocated, total = max(peaks)
    return {
        "memory/peak_gib": peak / GIB,
        "memory/allocated_gib": allocated / GIB,
        "memory/peak_share": peak / total,
    }

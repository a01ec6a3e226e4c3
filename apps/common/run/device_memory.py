"""What a step took of the devices' memory, for a run's metrics."""

import torch

from apps.common.run.ranks import gather_lists
from engines.devices.detect import devices_of

GIB = 2**30


def memory_metrics(device: str | torch.device) -> dict[str, float]:
    """GiB on the fullest rank since the last call, which every rank makes; nothing on a CPU, where nobody counts."""
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

"""The memory of a step, for a run's metrics: device peaks, and the memory table of what was registered."""

from collections.abc import Mapping
from typing import Any

import torch

from engines.devices.detect import devices_of
from runplan.estimates.buffers import Buffer
from runplan.report.memory_table import table_lines
from schedules.runtime.collectives import gather_lists
from seqpack.memory import ledger

GIB = 2**30


def memory_metrics(device: str | torch.device) -> dict[str, float]:
    """Return the GiB of the fullest rank: peaks since the last call (not on a CPU), and rows of the memory table, at
    most so far. Collective."""
    ranks = gather_lists([ledger.metrics()])
    held = {name: max(row.get(name, 0.0) for row in ranks) for name in dict.fromkeys(n for row in ranks for n in row)}
    devices = devices_of(device)
    figures = devices.memory()
    if figures is None:
        return held
    devices.reset_peak()
    peaks = gather_lists([(figures.peak, figures.allocated, figures.total)])
    peak, allocated, total = max(peaks)
    return held | {
        "memory/peak_gib": peak / GIB,
        "memory/allocated_gib": allocated / GIB,
        "memory/peak_share": peak / total,
    }


def memory_rows(metrics: Mapping[str, Any]) -> list[Buffer]:
    """Return the memory table in a row of metrics, as a plan has it."""
    sizes = {
        name: [GIB * metrics.get(f"memory/{place}/{name.replace(' ', '_')}_gib", 0.0) for place in ledger.PLACES]
        for name in ledger.NAMES
    }
    return [Buffer(name, device, host, always=True) for name, (device, host) in sizes.items() if device + host]


def memory_note(metrics: Mapping[str, Any]) -> str:
    """Return the memory table of a first step in one line."""
    rows = memory_rows(metrics)
    return "in memory: " + "; ".join(table_lines(rows, not any(row.device for row in rows)))

"""`python -m engines megatron`: each layout of four gloo ranks beside FSDP2 on one process, as a table."""

import tempfile
from pathlib import Path

import torch.distributed as dist

from engines.launch import ensure_group, launch
from engines.proofs.megatron_layouts import (
    CASES,
    MODELS,
    RANKS,
    LayoutCase,
    Measured,
    WeightedNLL,
    measure,
    measure_all,
    rows_of_table,
)

HEAD = ["model", "layout", "loss", "gradient norm", "scores", "weights", "after a checkpoint", "export"]


def main() -> int:
    """Measure and print; return 1 where a layout differs."""
    with tempfile.TemporaryDirectory(prefix="layouts_") as name:
        folder = Path(name)
        alone = _alone(folder)
        ranks = launch(measure_all, (CASES, WeightedNLL(), folder), world_size=RANKS, device="cpu")[0]
    rows = rows_of_table(CASES, alone, ranks)
    widths = [max(len(row[i]) for row in [HEAD, *rows]) for i in range(len(HEAD))]
    for row in [HEAD, ["-" * width for width in widths], *rows]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    print("\nLargest differences from FSDP2 on one process, float32, two steps and one after a checkpoint.")
    return int(any(max(map(float, row[2:7])) > 1e-5 or row[7] != "same" for row in rows))


def _alone(folder: Path) -> dict[str, Measured]:
    made = ensure_group("cpu")
    try:
        return {
            model: measure(LayoutCase(model), WeightedNLL(), folder / f"fsdp2 {model}", backend="fsdp2")
            for model in MODELS
        }
    finally:
        if made:
            dist.destroy_process_group()

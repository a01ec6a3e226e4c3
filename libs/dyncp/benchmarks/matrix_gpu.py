"""The exactness matrix in bfloat16 over NCCL: python -m torch.distributed.run --nproc-per-node 4 matrix_gpu.py

One process stands for one GPU; groups of 1, 2 and 4 are taken as far as there are GPUs. Bounds, against a float64
reference with the same bfloat16 weights: outputs and gradients within 1.5e-2 (relative, by norm), and neither
more than twice the error that one GPU makes in the same cell plus 2e-3. Any cell outside ends the run with an error.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from dyncp.exactness.matrix import GPU, Verdict, cells, markdown, must_refuse, run_sizes

BOUND, SLACK = 1.5e-2, 2e-3


def violations(by_size: dict[int, list[Verdict]]) -> list[str]:
    """Return a text for each cell that is outside the bounds."""
    bad = []
    for size, verdicts in by_size.items():
        for cell, verdict, alone in zip(cells(GPU), verdicts, by_size[1], strict=True):
            if must_refuse(cell, size, GPU) != bool(verdict.refused):
                bad.append(f"CP {size} {cell}: refused={verdict.refused!r}")
            for name in ("output_error", "gradient_error"):
                value, floor = getattr(verdict, name), getattr(alone, name)
                limit = BOUND if alone.refused else min(BOUND, 2 * floor + SLACK)
                if not value <= limit:
                    bad.append(f"CP {size} {cell}: {name} {value:.2e} > {limit:.2e} ({verdict.worst})")
    return bad


def main() -> None:
    begin = time.time()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", timeout=timedelta(minutes=9), device_id=device)
    sizes = [size for size in (1, 2, 4) if size <= dist.get_world_size()]
    runs = {size: [Verdict(**row) for row in rows] for size, rows in run_sizes(sizes, GPU, all_blocks=True).items()}
    torch.cuda.synchronize()
    bad = violations(runs)
    if dist.get_rank() == 0:
        print(f"bfloat16, {dist.get_world_size()} GPUs, {time.time() - begin:.0f} s; {torch.cuda.get_device_name()}\n")
        print(
            markdown([verdict for verdicts in runs.values() for verdict in verdicts]),
            "\n",
            *bad,
            sep="\n",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()

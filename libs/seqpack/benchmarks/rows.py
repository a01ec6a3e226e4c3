"""Packing the micro-batches of one step: each checked by itself, or the batch checked once.

    PYTHONPATH=libs/seqpack OMP_NUM_THREADS=1 python libs/seqpack/benchmarks/rows.py

CPU milliseconds of this process, the least of five runs.
"""

import time
from collections.abc import Callable

import torch

from seqpack.batches.batch import check_batch, make_batch
from seqpack.batches.packed import pack_each, pack_sequences
from seqpack.planning.micro_batches import plan_micro_batches
from seqpack.planning.mixes import lognormal


def timed(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return 1000 * best


def main() -> None:
    lengths = lognormal(512, 8192).tolist()
    batch = make_batch(
        [
            {
                "input_ids": torch.ones(n, dtype=torch.int64),
                "position_ids": torch.arange(n),
                "loss_mask": torch.arange(n) > 0,
                "old_log_probs": torch.zeros(n),
                "advantages": torch.zeros(n),
                "reward": 1.0,
            }
            for n in lengths
        ]
    )
    rows = plan_micro_batches(lengths, 16384).ranks[0]
    print(f"{len(lengths)} samples of {len(list(batch.keys()))} keys, {sum(lengths)} tokens, {len(rows)} micro-batches")
    print(f"check_batch alone: {timed(lambda: check_batch(batch)):.1f} ms")
    print(f"pack_sequences each: {timed(lambda: [pack_sequences(batch, r, align=2) for r in rows]):.1f} ms")
    print(f"pack_each: {timed(lambda: list(pack_each(batch, rows, align=2))):.1f} ms")


if __name__ == "__main__":
    main()

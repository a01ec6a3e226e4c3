"""plan_micro_batches at scale: CPU time and balance by mix, samples and ranks.

    PYTHONPATH=libs/seqpack OMP_NUM_THREADS=1 python libs/seqpack/benchmarks/micro_batch_scale.py

`lockstep`: cost of the step where all ranks wait for one another after each micro-batch, over the perfectly shared one,
mean and worst over the seeds. The cost is that of a dense model: 24576 s + s^2.
"""

import argparse
from statistics import mean
from time import process_time

from seqpack import plan_micro_batches
from seqpack.planning.mixes import MIXES

CASES = ((512, 8, 32768), (2048, 8, 32768), (8192, 64, 32768), (65536, 512, 65536), (65536, 4096, 32768))
LONGEST = 16384


def cost(length: int) -> float:
    """Return the cost of a sequence."""
    return 24576.0 * length + length * length


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    print(
        "| samples | ranks | cap | mix | micro-batches a rank | lockstep, mean | worst | CPU s |\n" + "|---" * 8 + "|"
    )
    for samples, ranks, cap in CASES:
        for name, mix in MIXES.items():
            lengths = [mix(samples, LONGEST, seed).tolist() for seed in range(seeds)]
            start = process_time()
            plans = [plan_micro_batches(row, cap, ranks, cost) for row in lengths]
            seconds = (process_time() - start) / seeds
            assert max(tokens for plan in plans for rank in plan.tokens for tokens in rank) <= cap
            ratios = [plan.max_over_mean for plan in plans]
            counts = plans[0].num_micro_batches
            numbers = f"{mean(ratios):.5f} | {max(ratios):.5f} | {seconds:.3f}"
            print(f"| {samples} | {ranks} | {cap} | {name} | {counts} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()

"""How long planning takes: python libs/dyncp/benchmarks/plan_speed.py [--repeats 20]."""

import argparse
import platform
import statistics
import time

import numpy as np

from dyncp.planning.planner import plan
from dyncp.planning.simulation import trace_lengths

CASES = (
    (4, 32, "lognormal"),
    (8, 64, "lognormal"),
    (64, 512, "lognormal"),
    (64, 512, "bimodal"),
    (64, 512, "uniform"),  # three of four sequences are longer than a rank's cap
    (64, 512, "half"),  # 0.2 to 0.5 of a rank's cap: what is hard to pack
    (64, 4096, "lognormal"),
    (512, 4096, "lognormal"),
    (4096, 65536, "lognormal"),
    (4096, 65536, "bimodal"),
    (4096, 65536, "uniform"),
    (4096, 65536, "half"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    print(f"{platform.processor() or platform.machine()}, one thread, CPU time\n")
    print("| ranks | sequences | lengths | steps | candidate | gap | median ms | best ms |", "|---" * 8 + "|", sep="\n")
    for ranks, count, trace in CASES:
        if trace == "half":
            lengths = np.random.default_rng(0).uniform(0.2 * 8192, 0.5 * 8192, count).astype(int).tolist()
        else:
            lengths = trace_lengths(trace, count, 4 * 8192)
        plan(lengths, ranks, 8192)
        times = []
        for _ in range(repeats if count < 10_000 else 3):
            begin = time.process_time()
            made = plan(lengths, ranks, 8192)
            times.append(time.process_time() - begin)
        median, best = statistics.median(times) * 1e3, min(times) * 1e3
        what = f"{ranks} | {count} | {trace} | {len(made.steps)} | {made.name} | {made.gap:.1%}"
        print(f"| {what} | {median:.1f} | {best:.1f} |")


if __name__ == "__main__":
    main()

"""How long planning takes: python libs/dyncp/benchmarks/plan_speed.py [--repeats 20]."""

import argparse
import platform
import statistics
import time

from dyncp.planner import plan
from dyncp.simulation import trace_lengths

CASES = ((4, 32), (8, 64), (64, 512), (64, 4096), (512, 4096))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    print(f"{platform.processor() or platform.machine()}, one thread, CPU time\n")
    print("| ranks | sequences | steps | candidate | median ms | best ms |", "|---" * 6 + "|", sep="\n")
    for ranks, count in CASES:
        lengths = trace_lengths("lognormal", count, 4 * 8192)
        plan(lengths, ranks, 8192)
        times = []
        for _ in range(repeats):
            begin = time.process_time()
            made = plan(lengths, ranks, 8192)
            times.append(time.process_time() - begin)
        median, best = statistics.median(times) * 1e3, min(times) * 1e3
        print(f"| {ranks} | {count} | {len(made.steps)} | {made.name} | {median:.1f} | {best:.1f} |")


if __name__ == "__main__":
    main()

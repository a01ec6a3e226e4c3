"""How good the plans are, against exact answers: random instances of at most ten items from many distributions.

    python libs/seqpack/benchmarks/certificates.py --instances 20000

Prints how often a plan is optimal, how often its own bound proves it, and the worst case.
"""

import argparse
import random
from collections.abc import Callable

from seqpack.planning.balancing import balance
from seqpack.planning.exact import least_maximum, min_bins
from seqpack.planning.packing import pack

CAPACITY = 120
SHAPES: dict[str, Callable[[random.Random], int]] = {
    "uniform": lambda r: r.randint(1, CAPACITY),
    "small": lambda r: r.randint(1, CAPACITY // 3),
    "a fifth to a half": lambda r: r.randint(CAPACITY // 5, CAPACITY // 2),
    "around a third": lambda r: r.choice([39, 40, 41, 42, 78, 79, 80]),
    "around a half": lambda r: r.choice([58, 59, 60, 61, 62]),
    "lognormal": lambda r: min(CAPACITY, max(1, round(r.lognormvariate(3.2, 0.9)))),
    "bimodal": lambda r: r.choice([r.randint(1, 15), r.randint(70, 100)]),
}


def packing(instances: int) -> None:
    print(
        "| lengths | instances | optimal | proven so | bound above the optimum | over capacity | worst bins / optimum |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, draw in SHAPES.items():
        rng = random.Random(name)
        optimal = proven = wrong = over = 0
        worst = 1.0
        for _ in range(instances):
            lengths = [draw(rng) for _ in range(rng.randint(1, 10))]
            plan = pack(lengths, CAPACITY)
            best = min_bins(lengths, CAPACITY)
            optimal += len(plan.bins) == best
            proven += plan.gap == 0
            wrong += plan.lower_bound > best
            over += max(plan.loads) > CAPACITY
            worst = max(worst, len(plan.bins) / best)
        shares = f"{optimal / instances:.2%} | {proven / instances:.2%}"
        print(f"| {name} | {instances} | {shares} | {wrong} | {over} | {worst:.3f} |")


def balancing(instances: int) -> None:
    print("\n| costs | equal sizes | instances | optimal | bound above the optimum | worst maximum / optimum |")
    print("|---|---|---|---|---|---|")
    for name, draw in SHAPES.items():
        for equal in (False, True):
            rng = random.Random(name)
            optimal = wrong = 0
            worst = 1.0
            for _ in range(instances):
                costs = [draw(rng) for _ in range(rng.randint(1, 9))]
                parts = rng.randint(1, 4)
                plan = balance(costs, parts, equal)
                best = least_maximum(costs, parts, equal)
                optimal += max(plan.loads) <= best
                wrong += plan.lower_bound > best * (1 + 1e-9)
                worst = max(worst, max(plan.loads) / best)
            print(f"| {name} | {equal} | {instances} | {optimal / instances:.2%} | {wrong} | {worst:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=2000)
    arguments = parser.parse_args()
    packing(arguments.instances)
    balancing(max(1, arguments.instances // 20))


if __name__ == "__main__":
    main()

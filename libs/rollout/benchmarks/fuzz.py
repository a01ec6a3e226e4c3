"""Sample in settings drawn at random, and hold tokens, masks, versions and log-probs to a teacher-forced pass.

PYTHONPATH=libs/rollout:libs/seqpack:libs/chat_tools python libs/rollout/benchmarks/fuzz.py --cases 2000

`rollout.testing.fuzz` draws the cases; `rollout/native/fuzz_test.py` plays the first of them in each run of the tests.
Each case that fails is printed with what does not hold; the exit status is 1 where one did.
"""

import argparse
import sys

from rollout.testing.fuzz import draw, problems


def main() -> None:
    """Play cases, and print those that fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--cases", type=int, default=2000)
    flags = parser.parse_args()
    failed = 0
    for seed in range(flags.first, flags.first + flags.cases):
        print(f"\rseed {seed} ", end="", file=sys.stderr, flush=True)  # beside the traceback of a case that raises
        if found := problems(draw(seed)):
            failed += 1
            print(draw(seed), *found[:5], sep="\n  ", flush=True)
    print(f"{flags.cases} cases, {failed} failed")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()

"""`python -m rollout capabilities`: the table of what each backend can do, and the test that shows it."""

import argparse
import sys

from rollout.capability_table import main as capabilities


def main() -> int:
    """Run a command of the library; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m rollout", description=__doc__)
    parser.add_argument("command", choices=["capabilities"])
    parser.parse_args()
    return capabilities()


if __name__ == "__main__":
    sys.exit(main())

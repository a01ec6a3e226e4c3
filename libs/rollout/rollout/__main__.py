"""The command `python -m rollout capabilities`: a table of what each backend can do, and the test that shows it."""

import argparse
import sys

from rollout.capability_table import main as capabilities


def main() -> int:
    """Run the command of the library that the arguments name and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m rollout", description=__doc__)
    parser.add_argument("command", choices=["capabilities"])
    parser.parse_args()
    return capabilities()


if __name__ == "__main__":
    sys.exit(main())

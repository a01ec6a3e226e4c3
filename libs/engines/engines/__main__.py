"""`python -m engines families`: the table that holds each model family's Yes."""

import argparse
import sys

from engines.families import conformance


def main() -> int:
    """Run a command of the library; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m engines", description=__doc__)
    parser.add_argument("command", choices=["families"], help="families: measure every family against transformers")
    parser.parse_args()
    return conformance.main()


if __name__ == "__main__":
    sys.exit(main())

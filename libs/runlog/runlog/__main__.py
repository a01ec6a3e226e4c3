"""`python -m runlog DIR`: write the report of a run, at any time, also while it goes on."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from runlog.report import PAGE_BYTES, write_report


def main(argv: Sequence[str]) -> int:
    """Write the reports of the named run directories; return 0, or 2 where one could not be written."""
    parser = argparse.ArgumentParser(prog="python -m runlog", description=__doc__)
    parser.add_argument("run_dir", nargs="+", type=Path, help="a folder that holds metrics.jsonl")
    parser.add_argument("--max-bytes", type=int, default=PAGE_BYTES, help="the largest page (default: %(default)s)")
    options = parser.parse_args(argv)
    status = 0
    for run_dir in options.run_dir:
        try:
            sys.stdout.write(f"{write_report(run_dir, max_bytes=options.max_bytes)}\n")
        except ValueError as error:
            sys.stderr.write(f"error: {error}\n")
            status = 2
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Reports of runs, at any time, also while they go on.

`python -m runlog DIR ...` writes each run's report.html, `compare DIR DIR ...` a page about all of them, `serve DIR`
shows a run's report at a loopback address and takes new rows as they come.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from runlog.compare import write_comparison
from runlog.report import PAGE_BYTES, write_report
from runlog.serve import server


def main(argv: Sequence[str]) -> int:
    """Do what the command line asks for; return 0, or 2 where a page could not be made."""
    command = argv[0] if argv and argv[0] in ("compare", "serve") else ""
    parser = argparse.ArgumentParser(
        prog=f"python -m runlog {command}".strip(),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    several = command != "serve"
    parser.add_argument("run_dir", nargs="+" if several else 1, type=Path, help="a folder that holds metrics.jsonl")
    if command == "serve":
        parser.add_argument("--port", type=int, default=0, help="of 127.0.0.1 (default: a free one)")
    else:
        parser.add_argument("--max-bytes", type=int, default=PAGE_BYTES, help="the largest page (default: %(default)s)")
    if command == "compare":
        parser.add_argument("--out", type=Path, default=Path("comparison.html"), help="the page (default: %(default)s)")
    options = parser.parse_args(argv[1:] if command else argv)
    try:
        if command == "serve":
            _serve(options.run_dir[0], options.port)
        elif command == "compare":
            sys.stdout.write(f"{write_comparison(options.run_dir, options.out, max_bytes=options.max_bytes)}\n")
        else:
            return _reports(options.run_dir, options.max_bytes)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _serve(run_dir: Path, port: int) -> None:
    """Serve a run until Ctrl-C."""
    with server(run_dir, port) as serving:
        sys.stdout.write(f"http://127.0.0.1:{serving.server_address[1]}/ shows {run_dir}; Ctrl-C ends it\n")
        sys.stdout.flush()
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            sys.stdout.write("\n")


def _reports(run_dirs: Sequence[Path], max_bytes: int) -> int:
    """Write the reports that can be written; return 2 where one could not."""
    status = 0
    for run_dir in run_dirs:
        try:
            sys.stdout.write(f"{write_report(run_dir, max_bytes=max_bytes)}\n")
        except ValueError as error:
            sys.stderr.write(f"error: {error}\n")
            status = 2
    return status


def program() -> None:
    """Run as a program."""
    raise SystemExit(main(sys.argv[1:]))


if __name__ == "__main__":
    program()

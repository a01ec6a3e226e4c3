"""`python -m seqpack view plan.json` draws a plan; `python -m seqpack plan lengths.json ...` makes one."""

import argparse
import json
import os
import sys
from pathlib import Path

from seqpack.drawing.view import render
from seqpack.planning.micro_batches import plan_micro_batches
from seqpack.planning.packing import pack


def main(argv: list[str] | None = None) -> int:
    """Run the command line; a user's error is one line on stderr and exit status 2."""
    parser = argparse.ArgumentParser(prog="python -m seqpack", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    view = commands.add_parser("view", help="draw a plan as one HTML file")
    view.add_argument("plan", type=_path, help="what a plan's to_json() wrote")
    view.add_argument("--out", type=_path, help="the HTML file (default: beside the plan)")
    plan = commands.add_parser("plan", help="make a plan from a JSON list of lengths")
    plan.add_argument("lengths", type=_path, help="a JSON list of lengths")
    plan.add_argument("--max-tokens", type=int, required=True, help="tokens that a bin or micro-batch may hold")
    plan.add_argument("--ranks", type=int, help="data-parallel ranks; micro-batches instead of bins")
    plan.add_argument("--out", type=_path, help="the JSON file (default: standard output)")
    arguments = parser.parse_args(argv)
    try:
        text, out = (_view if arguments.command == "view" else _plan)(arguments)
    except (OSError, ValueError) as error:
        print(f"seqpack: {error}", file=sys.stderr)
        return 2
    if out is None:
        print(text)
    else:
        out.write_text(text, encoding="utf-8")
        print(f"wrote {out}", file=sys.stderr)
    return 0


def _path(text: str) -> Path:
    """Return a path relative to the user's working directory, also under `bazel run`."""
    return Path(os.environ.get("BUILD_WORKING_DIRECTORY", "")) / text


def _view(arguments: argparse.Namespace) -> tuple[str, Path | None]:
    page = render(arguments.plan.read_text(encoding="utf-8"))
    return page, arguments.out or arguments.plan.with_suffix(".html")


def _plan(arguments: argparse.Namespace) -> tuple[str, Path | None]:
    lengths = json.loads(arguments.lengths.read_text(encoding="utf-8"))
    if arguments.ranks is None:
        return pack(lengths, arguments.max_tokens).to_json(), arguments.out
    return plan_micro_batches(lengths, arguments.max_tokens, arguments.ranks).to_json(), arguments.out


if __name__ == "__main__":
    sys.exit(main())

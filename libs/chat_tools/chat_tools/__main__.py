"""The command line: audit a chat template, view rendered conversations, parse a model's output."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chat_tools.dataset import read_rows
from chat_tools.parsing.formats import find_format, formats
from chat_tools.parsing.parser import parse
from chat_tools.rendering.audit import audit_template
from chat_tools.rendering.render import render
from chat_tools.rendering.stop_tokens import read_stop_tokens
from chat_tools.rendering.view import html_view, terminal_view


def load_tokenizer(directory: str) -> Any:
    """Load a tokenizer from a local directory."""
    if not Path(directory).is_dir():
        raise ValueError(f"{directory!r} is no directory: give the folder of a model or tokenizer (tokenizer.json)")
    try:
        from transformers import AutoTokenizer  # the library does without
    except ImportError as error:
        raise ValueError("loading a tokenizer needs transformers: pip install transformers jinja2") from error
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def audit(options: argparse.Namespace) -> int:
    """Audit a template; return 0 if the mask is safe, 1 if not."""
    tokenizer = load_tokenizer(options.directory)
    stops = read_stop_tokens(options.directory, tokenizer) or None
    report = audit_template(tokenizer, stop_tokens=stops, **_template_options(options.option))
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)
    return 0 if report.mask_safe else 1


def view(options: argparse.Namespace) -> int:
    """Show conversations of a file with their tokens coloured by mask."""
    tokenizer = load_tokenizer(options.directory)
    stops = read_stop_tokens(options.directory, tokenizer) or None
    rendered = []
    for number, (place, row) in enumerate(read_rows([options.file])):
        if number == options.first + options.count:
            break
        if number >= options.first:
            if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
                raise ValueError(f"{place}: the row has no list of 'messages'")
            extra = _template_options(options.option)
            rendered.append(render(tokenizer, row["messages"], row.get("tools"), stop_tokens=stops, **extra))
    if options.html:
        Path(options.html).write_text(html_view(rendered, Path(options.file).name), encoding="utf-8")
        print(f"wrote {options.html}: {len(rendered)} conversations")
    else:
        print("\n".join(terminal_view(r) for r in rendered))
    return 0


def show_formats(options: argparse.Namespace) -> int:
    """Print a page of each format, or of the named ones: aliases, the place of calls in a turn, an example."""
    for name in options.names or formats():
        fmt = find_format(name)
        print(f"## {fmt.name}\n")
        if fmt.aliases:
            print(f"Also called: {', '.join(fmt.aliases)}.")
        where = f"in `{fmt.section[0]}` ... `{fmt.section[1]}`" if fmt.section else "in the answer"
        where += f", or where the answer begins with `{fmt.opening}`" if fmt.opening else ""
        thinking = " or ".join(f"`{a}` ... `{b}`" for a, b in fmt.reasoning) or "a channel"
        print(f"Arguments: {type(fmt.body).__name__.lower()}. Calls stand {where}. Reasoning: {thinking}.\n")
        print(f"```\n{fmt.example}\n```\n")
    return 0


def conformance(options: argparse.Namespace) -> int:
    """Print one line for each real chat template; return 0 if all conform."""
    try:
        from chat_tools.conformance.check_templates import HEAD, check_template, summary
        from chat_tools.conformance.real_templates import template_names
    except ImportError as error:
        raise ValueError("this needs transformers, tokenizers and jinja2: pip install transformers jinja2") from error
    files = [name for name in options.names if name.endswith(".jinja")]
    if options.fetch:
        from chat_tools.conformance.corpus import fetched_templates  # slow to load

        files += map(str, fetched_templates(Path(options.fetch)))
    beginnings = tuple(name for name in options.names if not name.endswith(".jinja")) or ("",)
    listed = [] if files and beginnings == ("",) else template_names()
    names = [*(name for name in listed if name.startswith(beginnings)), *files]
    rows = []
    print(HEAD)
    for name in names:
        row = check_template(name)
        rows.append(row)
        print(row, flush=True)
        details = {"refused": row.refused, "problem": row.problems, "failure": row.failures}
        for kind, texts in details.items() if options.verbose else ():
            for text in texts:
                print(f"    {kind}: {text}")
    print(summary(rows))
    return 1 if any(row.failures for row in rows) else 0


def parse_command(options: argparse.Namespace) -> int:
    """Parse a model's output (a file or standard input) and print it as JSON."""
    raw = Path(options.file).read_bytes() if options.file else sys.stdin.buffer.read()
    message = parse(raw, options.format)
    data = asdict(message)
    data["malformed"] = [m._asdict() for m in message.malformed]
    data["segments"] = [s._asdict() for s in message.segments]
    print(json.dumps(data, indent=2))
    return 0


def _template_options(pairs: list[str]) -> dict[str, Any]:
    result = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--option takes NAME=VALUE, such as enable_thinking=false, not {pair!r}")
        try:
            result[key] = json.loads(value)
        except ValueError:
            result[key] = value
    return result


def build_arguments() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(prog="python -m chat_tools", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    help_option = "an option of the template, NAME=VALUE"

    command = commands.add_parser("audit", help="is a chat template fit for training?")
    command.add_argument("directory", help="folder of the tokenizer")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.add_argument("--option", action="append", default=[], help=help_option)
    command.set_defaults(run=audit)

    command = commands.add_parser("view", help="show conversations, tokens coloured by mask")
    command.add_argument("directory", help="folder of the tokenizer")
    command.add_argument("file", help="conversations, .jsonl or .parquet with a column 'messages'")
    command.add_argument("--html", metavar="FILE", help="write a page in place of the terminal's colours")
    command.add_argument("--first", type=int, default=0, help="first row to show")
    command.add_argument("--count", type=int, default=1, help="how many rows to show")
    command.add_argument("--option", action="append", default=[], help=help_option)
    command.set_defaults(run=view)

    command = commands.add_parser(
        "conformance",
        help="try the chat templates of real models: trl's wheel's, or those of the folder $CHAT_TEMPLATES",
    )
    command.add_argument("names", nargs="*", help="beginnings of templates' names, or .jinja files; all without them")
    command.add_argument(
        "--fetch",
        metavar="DIR",
        help="fetch the newest TRL, llama-cpp-python and vLLM (sources alone) into DIR with pip; try their templates",
    )
    command.add_argument("--verbose", action="store_true", help="list refusals, problems and failures")
    command.set_defaults(run=conformance)

    command = commands.add_parser("formats", help="show the tool-call formats, each with an example")
    command.add_argument("names", nargs="*", help="formats, by any of their names; all without them")
    command.set_defaults(run=show_formats)

    command = commands.add_parser("parse", help="take a model's output apart")
    command.add_argument("format", help="one of chat_tools.formats()")
    command.add_argument("file", nargs="?", help="a text file; standard input without it")
    command.set_defaults(run=parse_command)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run a command; a user's error is one line."""
    options = build_arguments().parse_args(arguments)
    try:
        code: int = options.run(options)
    except ValueError as error:
        print(f"chat_tools: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())

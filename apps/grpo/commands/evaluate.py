"""Evaluate a model on held-out tasks, without training it:

bazel run //apps/grpo:evaluate -- --model DIR --preset gsm8k --data test.parquet --num-generations-eval 8

Every flag of the grpo app is taken; besides, `--out DIR` says where the numbers and all answers are written.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from apps.common.cli import command_line as cli
from apps.common.cli.help import HELP
from apps.common.program import command, program
from apps.grpo.first_look import look
from apps.grpo.main import configure

USAGE = """usage: {program} [--out DIR] FLAGS

Ask a model held-out tasks and print mean@k, pass@k and maj@k, each with its 95 % interval (a bootstrap over prompts).
Nothing is trained.

  --model DIR
        The model; the export of a run (RUN/export) too.
  --eval-data FILE, or --data FILE
        Prompts with reference answers: those of --eval-data, else all of --data.
  --preset gsm8k, math, aime or geo3k
        The columns, the system prompt and the marks of such files.
  --reward FILE.py:NAME
        What scores an answer; without it math-verify compares it with the reference.
  --environment FILE.py:NAME, --tasks FILE
        What is played in place of a file: its held-out tasks.
  --num-generations-eval INT
        Answers to each prompt: 1 takes the likeliest tokens, more are sampled. (default: 1)
  --eval-prompts INT
        At most so many prompts. (default: all)
  --out DIR
        Where evaluation.json (numbers and settings) and answers.jsonl are written.

The other flags are those of the grpo app: {grpo} --help
"""
"""The help of this command."""


def _own_flags(argv: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return the words for the grpo app, and the value of --out. ValueError: it has none."""
    rest, out = [], None
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name != "--out":
            rest.append(word)
        elif not (value := value if equals else next(words, "")):
            raise ValueError("--out takes a directory")
        else:
            out = Path(value)
    return rest, out


def main(argv: Sequence[str]) -> None:
    """Evaluate what the command line asks for."""
    if set(HELP) & set(argv):
        sys.stdout.write(USAGE.format(program=program("evaluate"), grpo=command("grpo")))
        raise SystemExit(0)
    rest, out = _own_flags(argv)
    config = configure(rest)
    every = not any(word.partition("=")[0].replace("_", "-") == "--eval-prompts" for word in rest)
    with look(config, None):
        from apps.grpo.commands.evaluate_model import evaluate_model  # it imports torch, which help and errors need not

        for line in evaluate_model(config, out, every).lines():
            sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    cli.main(lambda: main(sys.argv[1:]))

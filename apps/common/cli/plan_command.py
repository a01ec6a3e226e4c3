"""The commands that start nothing: `--recipe list`, `--recipe NAME --plan`, and `--loading`."""

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from runplan.checks.machine import seen_here
from runplan.estimates.loading import loading_table
from runplan.report.plan import make_plan
from runplan.report.recipe_table import recipe_table
from runplan.run_spec import RunSpec


def answer_without_running(
    argv: Sequence[str],
    specs: Callable[[], Sequence[tuple[RunSpec, RunSpec]]],
    planned: Callable[[Sequence[str]], RunSpec],
    typed: Sequence[str],
) -> None:
    """Answer where `argv` asks for the table of recipes, a plan, or what reading the models takes; else return.

    Args:
        argv: the command line without `--shrink`.
        specs: returns those of all recipes, each in full and shrunk.
        planned: turns the rest of a command line with `--plan` into what it asks for.
        typed: the whole command line.

    Raises:
        SystemExit: once it is printed; with 1 for a plan with problems, and what is merely not implemented is none.
    """
    words = list(argv)
    if "--recipe=list" in words or ("--recipe", "list") in itertools.pairwise(words):
        sys.stdout.write(recipe_table(specs()) + "\n")
        raise SystemExit(0)
    if words == ["--loading"]:
        sys.stdout.write(loading_table(spec.origin.shape for spec, _ in specs() if spec.origin) + "\n")
        raise SystemExit(0)
    if "--plan" in words:
        spec = planned([word for word in words if word != "--plan"])
        if "--resume" in words or len(typed) > len(words):  # what it begins with is a run's, or too large to start
            spec = replace(spec, words=tuple(word for word in typed if word != "--plan"))
        plan = make_plan(spec)
        here = "".join(f"{'Here' if i == 0 else '':<10}{line}\n" for i, line in enumerate(seen_here(spec, os.environ)))
        sys.stdout.write(f"{here}{plan}\n")
        raise SystemExit(1 if plan.problems else 0)

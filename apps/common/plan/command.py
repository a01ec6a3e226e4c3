"""The commands that start nothing: `--recipe list`, `--recipe NAME --plan`, and `--loading`."""

import itertools
import os
import sys
from collections.abc import Callable, Sequence

from apps.common.plan.loading import loading_table
from apps.common.plan.machine import seen_here
from apps.common.plan.report import make_plan
from apps.common.plan.table import recipe_table
from apps.common.plan.work import Work


def answer_without_running(
    argv: Sequence[str], works: Callable[[], Sequence[tuple[Work, Work]]], planned: Callable[[Sequence[str]], Work]
) -> None:
    """Answer where `argv` asks for the table of recipes, a plan, or what reading the models takes; else return.

    `works`: those of all recipes, each in full and shrunk. `planned` turns the rest of a command line with `--plan`
    into what it asks for.

    Raises:
        SystemExit: once it is printed; with 1 for a plan with problems, and what is merely not implemented is none.
    """
    words = list(argv)
    if "--recipe=list" in words or ("--recipe", "list") in itertools.pairwise(words):
        sys.stdout.write(recipe_table(works()) + "\n")
        raise SystemExit(0)
    if words == ["--loading"]:
        sys.stdout.write(loading_table(work.origin.shape for work, _ in works() if work.origin) + "\n")
        raise SystemExit(0)
    if "--plan" in words:
        work = planned([word for word in words if word != "--plan"])
        plan = make_plan(work)
        here = "".join(f"{'Here' if i == 0 else '':<10}{line}\n" for i, line in enumerate(seen_here(work, os.environ)))
        sys.stdout.write(f"{here}{plan}\n")
        raise SystemExit(1 if plan.problems else 0)

"""The two commands that start nothing: `--recipe list`, and `--recipe NAME --plan`."""

import itertools
import sys
from collections.abc import Callable, Sequence

from apps.common.plan.report import make_plan
from apps.common.plan.table import recipe_table
from apps.common.plan.work import Work


def answer_without_running(
    argv: Sequence[str], works: Callable[[], Sequence[Work]], planned: Callable[[Sequence[str]], Work]
) -> None:
    """Print the table of recipes or a plan where `argv` asks for one, and end the program; else return.

    `works`: those of all recipes. `planned` turns the rest of a command line with `--plan` into what it asks for.

    Raises:
        SystemExit: with status 0, or 1 for a plan with problems; what is merely not implemented is none.
    """
    words = list(argv)
    if "--recipe=list" in words or ("--recipe", "list") in itertools.pairwise(words):
        sys.stdout.write(recipe_table(works()) + "\n")
        raise SystemExit(0)
    if "--plan" in words:
        plan = make_plan(planned([word for word in words if word != "--plan"]))
        sys.stdout.write(f"{plan}\n")
        raise SystemExit(1 if plan.problems else 0)

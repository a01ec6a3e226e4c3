"""The commands that start nothing: `--recipe list`, `--recipe NAME --plan`, and `--loading`."""

import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a list of recipes needs no torch
    from runplan.run_spec import RunSpec


def answer_without_running(
    argv: Sequence[str],
    recipes: Callable[[], Mapping[str, Any]],
    specs: "Callable[[], Sequence[tuple[RunSpec, RunSpec]]]",
    planned: "Callable[[Sequence[str]], RunSpec]",
    typed: Sequence[str],
) -> None:
    """Answer where `argv` asks for the recipes, a plan, or what reading the models takes; else return.

    Args:
        argv: the command line without `--shrink`.
        recipes: returns all recipes by name.
        specs: returns those of all recipes, each in full and shrunk.
        planned: turns the rest of a command line with `--plan` into what it asks for.
        typed: the whole command line.

    Raises:
        SystemExit: once it is printed; with 1 for a plan with problems, and what is merely not implemented is none.
    """
    words = list(argv)
    if "--recipe=list" in words or ("--recipe", "list") in itertools.pairwise(words):
        if "--plan" not in words:
            sys.stdout.write(list_recipes(recipes()))
            raise SystemExit(0)
        from runplan.report.recipe_table import recipe_table  # torch

        sys.stdout.write(recipe_table(specs()) + "\n")
        raise SystemExit(0)
    if words == ["--loading"]:
        from runplan.estimates.loading import loading_table  # torch

        sys.stdout.write(loading_table(spec.origin.shape for spec, _ in specs() if spec.origin) + "\n")
        raise SystemExit(0)
    if "--plan" in words:
        _print_plan(planned([word for word in words if word != "--plan"]), words, typed)


def _print_plan(spec: "RunSpec", words: Sequence[str], typed: Sequence[str]) -> None:
    """Print a plan, and end the program."""
    from apps.common.cli.untested import names_of_nothing  # a list of recipes needs none of these
    from runplan.checks.machine import device_memory_gib, seen_here  # the same
    from runplan.report.forwards_ahead import asks_for_counts, with_forwards_ahead  # the same
    from runplan.report.plan import make_plan  # the same

    if "--resume" in words or len(typed) > len(words):  # what it begins with is a run's, or too large to start
        spec = replace(spec, words=tuple(word for word in typed if word != "--plan"))
    if asks_for_counts(spec) and spec.cluster.pools.device_memory_gib is None:
        spec = with_forwards_ahead(spec, device_memory_gib(spec))
    plan = make_plan(spec)
    plan.problems += names_of_nothing(spec)
    here = "".join(f"{'Here' if i == 0 else '':<10}{line}\n" for i, line in enumerate(seen_here(spec, os.environ)))
    sys.stdout.write(f"{here}{plan}\n")
    raise SystemExit(1 if plan.problems else 0)


def list_recipes(recipes: Mapping[str, Any]) -> str:
    """Return a line a recipe: its name, and the first line of its file's text."""
    width = max(map(len, recipes))
    lines = [f"{name:<{width}}  {_about(type(recipe), name)}" for name, recipe in recipes.items()]
    hint = "--recipe list --plan says which of them can be run today, in full and shrunk."
    return "\n".join([*lines, "", hint, ""])


def _about(kind: type, name: str) -> str:
    package = kind.__module__.rpartition(".")[0]
    module = import_module(f"{package}.recipes.{name.replace('-', '_')}")
    return (module.__doc__ or "").partition("\n\n")[0].replace("\n", " ").strip()

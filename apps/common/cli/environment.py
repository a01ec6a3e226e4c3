"""Environment variables that a recipe owns.

They act when libraries are imported, so the program starts again with them.
"""

import os
import sys
from collections.abc import Mapping, Sequence

from apps.common.plan.needs import missing_variables


def start_with(entries: Sequence[str]) -> None:
    """Replace this process by the same command line with the NAME=value entries set; return where they are.

    They are in the run's config.json as `cluster.environment`.

    Raises:
        ValueError: one of them has another value already.
    """
    lacking = to_set(entries, os.environ)
    if lacking:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **lacking})


def to_set(entries: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are not set yet.

    Raises:
        ValueError: one of them has another value.
    """
    missing = missing_variables(tuple(entries), environ)
    other = [entry for entry in missing if entry.partition("=")[0] in environ]
    if other:
        name, _, value = other[0].partition("=")
        raise ValueError(
            f"{name} is {environ[name]!r} where the recipe wants {value!r}: unset it, or change --cluster.environment"
        )
    return {name: value for name, _, value in (entry.partition("=") for entry in missing)}

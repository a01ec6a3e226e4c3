"""What a start needs before its settings are read: files of other machines, and environment variables of a recipe.

Variables act when libraries are imported, so the program starts again with them.
"""

import os
import sys
from collections.abc import Mapping, Sequence

SHARED = "TESSERA_INPUTS_SHARED"
"""Variable that is set once this start has the files of other machines."""


def on_several_machines() -> bool:
    """Return whether torchrun started ranks of this run on other machines, too."""
    world = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", world) != world


def share_between_machines(argv: Sequence[str], kind: type) -> None:
    """Give each machine of a run the files that its command line names and only others have; see `share_inputs`."""
    if not on_several_machines() or SHARED in os.environ:
        return
    from apps.common.cli.shared_inputs import share_inputs  # slow to load

    share_inputs(argv, kind)
    os.environ[SHARED] = "1"


def restart_with(entries: Sequence[str]) -> None:
    """Restart this process with the NAME=value entries set; return where they are set already.

    They are in the run's config.json as `cluster.env`.

    Raises:
        ValueError: one of them has another value already.
    """
    lacking = variables_to_set(entries, os.environ)
    if lacking:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **lacking})


def missing_variables(environment: tuple[str, ...], environ: Mapping[str, str]) -> list[str]:
    """Return the NAME=value entries that are not in `environ`."""
    return [entry for entry in environment if environ.get(entry.partition("=")[0]) != entry.partition("=")[2]]


def refuse_unset(environment: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Raise ValueError for variables that whoever starts the program has to set, as a plan's launch lines do."""
    unset = missing_variables(environment, environ)
    if unset:
        raise ValueError(
            f"start the program with {' '.join(unset)} in front: --env names it, and it acts when "
            "libraries are imported"
        )


def variables_to_set(entries: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are not set yet.

    Raises:
        ValueError: one of them has another value.
    """
    missing = missing_variables(tuple(entries), environ)
    other = [entry for entry in missing if entry.partition("=")[0] in environ]
    if other:
        name, _, value = other[0].partition("=")
        raise ValueError(f"{name} is {environ[name]!r} where the recipe wants {value!r}: unset it, or change --env")
    return {name: value for name, _, value in (entry.partition("=") for entry in missing)}

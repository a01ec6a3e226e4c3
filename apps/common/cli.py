"""The command line of the apps: typed flags from a frozen dataclass, on top of a named recipe or of an earlier run."""

import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro

from apps.common.config_file import CONFIG_NAME, dump_config, load_config
from apps.common.run_dir import newest_run

C = TypeVar("C")


def user_directory() -> None:
    """Work where the user stands: `bazel run` starts a program elsewhere and names the user's folder."""
    directory = os.environ.get("BUILD_WORKING_DIRECTORY")
    if directory:
        os.chdir(directory)


def parse(
    kind: type[C], recipes: Mapping[str, C], argv: Sequence[str], prog: str, runs: Path, usual: str = "quickstart"
) -> C:
    """The configuration that `argv` asks for.

    `--recipe NAME` picks the defaults (`usual` without it); `--resume` takes them from the run in `--run-dir`, or from
    the newest one under `runs`. Every other flag overrides one field. `--print-config` shows the result and ends the
    program.

    Raises:
        SystemExit: with status 2 and a message that names the nearest valid spelling, for anything that can't be taken.
    """
    user_directory()
    recipe = _peek(argv, "--recipe") or usual
    if recipe not in recipes:
        near = difflib.get_close_matches(recipe, recipes, n=1)
        _refuse(
            f"no recipe {recipe!r}"
            + (f", perhaps you meant {near[0]!r}" if near else "")
            + f"; there are {', '.join(recipes)}"
        )
    default = recipes[recipe]
    if "--resume" in argv:
        default = _earlier_run(kind, _peek(argv, "--run-dir"), runs)
    flags = [flag for flag in argv if flag != "--print-config"]
    config = tyro.cli(kind, default=default, args=flags, prog=prog)
    if len(flags) < len(argv):
        sys.stdout.write(dump_config(config))
        raise SystemExit(0)
    return config


def main(run: Callable[[], Any]) -> None:
    """Call `run`; a user's error (ValueError) ends the program with its message alone and status 2."""
    try:
        run()
    except ValueError as error:
        _refuse(str(error))
    except KeyboardInterrupt as stop:
        sys.stderr.write(f"{stop or 'stopped'}\n")
        raise SystemExit(130) from None


def with_real_recipe(argv: Sequence[str], recipe: str) -> list[str]:
    """`argv`, asking for `recipe` where a model or file is given and no recipe is."""
    names = {word.split("=")[0] for word in argv}
    real = names & {"--model", "--data"} and not names & {"--recipe", "--resume"}
    return [*argv, "--recipe", recipe] if real else list(argv)


def _earlier_run(kind: type[C], named: str | None, runs: Path) -> C:
    directory = Path(named) if named else newest_run(runs)
    if directory is None:
        _refuse(f"nothing to resume under {runs}; name a run with --run-dir DIR")
    if not (directory / CONFIG_NAME).is_file():
        _refuse(f"nothing to resume in {directory}: it has no {CONFIG_NAME}")
    return load_config(kind, directory / CONFIG_NAME)


def _peek(argv: Sequence[str], flag: str) -> str | None:
    for i, word in enumerate(argv):
        if word.startswith(flag + "="):
            return word.partition("=")[2]
        if word == flag and i + 1 < len(argv):
            return argv[i + 1]
    return None


def _refuse(message: str) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    raise SystemExit(2)

"""The command line of the apps: typed flags from a frozen dataclass, on top of a named recipe or of an earlier run."""

import difflib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, NoReturn, TypeVar

import tyro

from apps.common.cli.flags import SettingsError, as_type, changed, flag, flag_type, leaves
from apps.common.cli.peer_flags import peer_hints
from apps.common.cli.short_help import MORE, help_flags
from apps.common.run.config_file import CONFIG_NAME, dump_config, load_config
from apps.common.run.divergence import DivergenceError
from apps.common.run.full_disk import FullDiskError
from apps.common.run.idle_steps import IdleRunError
from apps.common.run.run_dir import newest_run
from engines import FailedStepError
from schedules.runtime.interrupts import handle_interrupts

C = TypeVar("C")


@dataclass(frozen=True)
class CommandLine(Generic[C]):
    """The command line of an app."""

    prog: str
    kind: type[C]
    """The app's configuration; it has the fields recipe, run_dir and resume."""
    recipes: Mapping[str, C]
    runs: Path
    """Where runs are, newest last, for --resume without --run-dir."""
    default_recipe: str = "quickstart"
    """The recipe where none is named."""
    by_flag: Mapping[str, str] = field(default_factory=dict)
    """The recipe where none is named, but this flag is given; the first that applies."""
    owned: Mapping[str, str] = field(default_factory=dict)
    """Fields without a flag, and what to use instead; see `apps.common.cli.flags`."""
    types: Mapping[str, Any] = field(default_factory=dict)
    """Fields whose flags have another type."""
    peers: Mapping[str, str] = field(default_factory=dict)
    """Other trainers' names for our flags; see `apps.common.cli.peer_flags`."""
    own_model: Callable[[C], C] = lambda recipe: recipe
    """The recipe's settings where --model names a model of the user's."""
    fixed: Sequence[str] = ("recipe", "model")
    """Fields, or groups of them, that a resumed run can't change."""
    beside: Callable[[C, C], Iterable[str]] = lambda _, __: ()
    """What else is wrong with the values of a command line (which are not checked yet), seen beside its recipe."""
    reset: Callable[[C, C], tuple[C, list[str]]] = lambda recipe, _: (recipe, [])
    """The recipe without those of its settings that the values of a command line leave without an effect, and lines
    that say so."""

    def parse(self, argv: Sequence[str]) -> C:
        """Return the configuration that `argv` asks for.

        `--recipe NAME` picks the defaults; `--resume` takes them from the run in `--run-dir`, or from the newest one
        under `runs`. Every other flag overrides one field. `--print-config` shows the result and ends the program.

        Raises:
            SystemExit: with status 2 and a message that names the nearest valid spelling, for what can't be taken.
            SettingsError, ValueError: values that can't be taken, all of them at once; or a run that can't be resumed.
        """
        user_directory()
        default = self.default(argv)
        self._refuse_other_names(argv, default)
        flags = [word for word in argv if word != "--print-config"]
        args, brief = help_flags(flags)
        kind = self._brief if brief else self._all
        about = f"{inspect.getdoc(self.kind)}\n\n{MORE}" if brief else None
        view = as_type(default, kind)
        parsed = tyro.cli(kind, default=view, args=args, prog=self.prog, description=about)
        default, lines = self.reset(view, parsed)
        if lines:
            sys.stderr.write("".join(f"{line}\n" for line in lines))
            parsed = tyro.cli(kind, default=default, args=args, prog=self.prog, description=about)
        problems = [*self.beside(parsed, default)]
        if "--resume" in argv:
            problems += self._changes(parsed, default)
        try:
            config = as_type(parsed, self.kind)
        except SettingsError as error:
            raise SettingsError([*error.lines, *problems]) from None
        if problems:
            raise SettingsError(problems)
        if len(flags) < len(argv):
            sys.stdout.write(dump_config(config))
            raise SystemExit(0)
        return config

    @cached_property
    def _all(self) -> type[C]:
        return flag_type(self.kind, self.owned, {"recipe": Literal[tuple(self.recipes)], **self.types})

    @property
    def _brief(self) -> type[C]:
        return flag_type(self._all, {"cluster": MORE}, {})

    def default(self, argv: Sequence[str]) -> C:
        """Return the recipe, or the earlier run's configuration, whose fields the flags of `argv` override."""
        if "--resume" in argv:
            return self._earlier_run(_peek(argv, "--run-dir"))
        flags = {word.split("=")[0] for word in argv}
        default_recipe = next((recipe for flag, recipe in self.by_flag.items() if flag in flags), self.default_recipe)
        recipe = _peek(argv, "--recipe") or default_recipe
        if recipe not in self.recipes:
            near = difflib.get_close_matches(recipe, self.recipes, n=1)
            meant = f", perhaps you meant {near[0]!r}" if near else ""
            _refuse(f"no recipe {recipe!r}{meant}; there are {', '.join(self.recipes)}")
        return self.own_model(self.recipes[recipe]) if "--model" in flags else self.recipes[recipe]

    def _earlier_run(self, named: str | None) -> C:
        directory = Path(named) if named else newest_run(self.runs)
        if directory is None:
            _refuse(f"nothing to resume under {self.runs}; name a run with --run-dir DIR")
        if not (directory / CONFIG_NAME).is_file():
            _refuse(f"nothing to resume in {directory}: it has no {CONFIG_NAME}")
        return load_config(self.kind, directory / CONFIG_NAME)

    def _refuse_other_names(self, argv: Sequence[str], default: C) -> None:
        known = [flag(path) for path, _, _ in leaves(default) if path not in self.owned]
        owned = {flag(path).removeprefix("--"): text.removeprefix("use ") for path, text in self.owned.items()}
        hints = peer_hints(argv, known, {**self.peers, **owned})
        if hints:
            _refuse("; ".join(hints) + f". All flags: {self.prog} --help")

    def _changes(self, config: C, default: C) -> Iterator[str]:
        for path in changed(config, default):
            if any(path == name or path.startswith(name + ".") for name in self.fixed):
                yield f"{flag(path)} can't change when a run is resumed: leave it out, or start a new run"


def user_directory() -> None:
    """Change to the directory in which the user ran the command; `bazel run` starts a program in another one."""
    directory = os.environ.get("BUILD_WORKING_DIRECTORY")
    if directory:
        os.chdir(directory)


def main(run: Callable[[], Any]) -> None:
    """Call `run` and exit: status 2 and one line a problem for a user's error, 1 for a run that diverged, trains
    nothing or has no disk left, 130 for Ctrl-C."""
    try:
        with handle_interrupts():
            run()
    except SettingsError as error:
        _refuse(*error.lines)
    except ValueError as error:
        _refuse(str(error))
    except (FullDiskError, FailedStepError, DivergenceError, IdleRunError) as error:
        _refuse(str(error), status=1)
    except KeyboardInterrupt as stop:
        sys.stderr.write(f"{stop or 'stopped'}\n")
        raise SystemExit(130) from None


def _peek(argv: Sequence[str], name: str) -> str | None:
    for i, word in enumerate(argv):
        if word.startswith(name + "="):
            return word.partition("=")[2]
        if word == name and i + 1 < len(argv):
            return argv[i + 1]
    return None


def _refuse(*messages: str, status: int = 2) -> NoReturn:
    sys.stderr.write("".join(f"error: {' '.join(message.split())}\n" for message in messages))
    raise SystemExit(status)

"""The command line of the apps: typed flags from a frozen dataclass, on top of a named recipe or of an earlier run."""

import difflib
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import tyro

from apps.common.cli.extensions import POINTS, absolute_names, help_of
from apps.common.cli.flag_names import unknown_flags, with_current_names
from apps.common.cli.flags import (
    SettingsError,
    aliases_of,
    as_type,
    changed,
    flag,
    flag_type,
    leaves,
    name_or_file,
)
from apps.common.cli.help import HELP, HELP_ALL, Groups, long_help, short_help
from apps.common.cli.peer_flags import peer_hints
from apps.common.cli.refusals import write_errors
from apps.common.cli.values import with_values
from apps.common.cli.yaml_config import dump_yaml, load_yaml
from apps.common.run.config_file import CONFIG_NAME, load_config
from apps.common.run.divergence import DivergenceError
from apps.common.run.full_disk import FullDiskError
from apps.common.run.idle_steps import IdleRunError
from apps.common.run.lost_machine import LostMachineError
from apps.common.run.run_dir import newest_run
from engines import FailedStepError
from schedules.runtime.interrupts import handle_interrupts
from seqpack.extensions.load_object import is_user_code

C = TypeVar("C")
CONFIG, PRINT_CONFIG = "--config", "--print-config"


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
    groups: Groups = field(default_factory=dict)
    """Fields that `--help` shows, by the titles of their groups."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """Flags of the app that are of no field, each with its help."""
    own_recipe: Callable[[str, Sequence[str]], C] | None = None
    """The settings of a recipe of the user's, by its FILE.py:NAME and its options."""
    reset: Callable[[C, C], tuple[C, list[str]]] = lambda recipe, _: (recipe, [])
    """The recipe without those of its settings that the values of a command line leave without an effect, and lines
    that say so."""

    def parse(self, argv: Sequence[str]) -> C:
        """Return the configuration that `argv` asks for.

        `--recipe NAME` picks the defaults; `--resume` takes them from the run in `--run-dir`, or from the newest one
        under `runs`. The settings of `--config FILE` override these, every other flag overrides one field.
        `--print-config` prints the result as such a file and ends the program, as `--help` and `--help-all` do.

        Raises:
            SystemExit: with status 2 and a message that names the nearest valid spelling, for what can't be taken.
            SettingsError, ValueError: values that can't be taken, all of them at once; or a run that can't be resumed.
        """
        user_directory()
        if asked := requested_point(argv):
            sys.stdout.write(help_of(asked[0], self.kind, asked[1]))
            raise SystemExit(0)
        argv, renamed = with_current_names(argv, self._paths)
        sys.stderr.write("".join(f"{line}\n" for line in renamed))
        argv, printing, values = self._with_config_file(argv)
        words = [*argv, *self._as_words(values)]
        default = self.default(words)
        self._answer_help(argv, default)
        self._refuse_other_names(argv)
        if (asking := self._asking(words)) and "--resume" not in words and _peek(words, "--recipe") is None:
            line = f"{asking} without --recipe: recipe {self.by_flag[asking]}, not {self.default_recipe}"
            sys.stderr.write(f"{line}; --recipe NAME takes another\n")
        view = with_values(as_type(default, self._all), values)
        parsed = self._parsed(argv, view)
        reset, lines = self.reset(view, parsed)
        if lines:
            sys.stderr.write("".join(f"{line}\n" for line in lines))
            view, parsed = reset, self._parsed(argv, reset)
        problems = [*self.beside(parsed, view)]
        if "--resume" in argv or values.get("resume"):
            problems += self._changes(parsed, default)
        try:
            config = as_type(parsed, self.kind)
        except SettingsError as error:
            raise SettingsError([*error.lines, *problems]) from None
        if problems:
            raise SettingsError(problems)
        if printing:
            sys.stdout.write(dump_yaml(config, self.owned))
            raise SystemExit(0)
        return config

    @cached_property
    def _all(self) -> type[C]:
        return flag_type(self.kind, self.owned, {"recipe": name_or_file(self.recipes), **self.types})

    @cached_property
    def _paths(self) -> list[str]:
        return [path for path, _, _ in leaves(self.recipes[self.default_recipe])]

    def _parsed(self, argv: Sequence[str], default: C) -> C:
        parsed: C = absolute_names(tyro.cli(self._all, default=default, args=list(argv), prog=self.prog))
        return parsed

    def _with_config_file(self, argv: Sequence[str]) -> tuple[list[str], bool, dict[str, Any]]:
        """Return the command line without `--config FILE` and `--print-config`, whether the latter was in it, and the
        settings of the file by dotted path."""
        rest = [word for word in argv if word != PRINT_CONFIG]
        named = _peek(rest, CONFIG)
        if named is None and not any(word.partition("=")[0] == CONFIG for word in rest):
            return rest, PRINT_CONFIG in argv, {}
        if named is None or named.startswith("--"):
            raise SettingsError([f"{CONFIG} takes a YAML file, such as {PRINT_CONFIG} prints"])
        at = next(i for i, word in enumerate(rest) if word.partition("=")[0] == CONFIG)
        del rest[at : at + (1 if "=" in rest[at] else 2)]
        known = self.recipes[self.default_recipe]
        return rest, PRINT_CONFIG in argv, load_yaml(self.kind, known, Path(named), self.owned)

    def _as_words(self, values: Mapping[str, Any]) -> list[str]:
        """Return what of a file's settings decides on the defaults, as words of a command line."""
        deciding = {"--recipe", "--run-dir", *self.by_flag, "--model"}
        words = [f"{flag(path)}={value}" for path, value in values.items() if value and flag(path) in deciding]
        return words + (["--resume"] if values.get("resume") else [])

    def _answer_help(self, argv: Sequence[str], default: C) -> None:
        """Print the help, and end the program, where it is asked for."""
        if set(HELP_ALL) & set(argv):
            text = long_help(self.prog, self.kind, default, self.owned, self.types, self.commands)
        elif set(HELP) & set(argv):
            text = short_help(self.prog, self.kind, default, self.groups, self.types, self.commands)
        else:
            return
        sys.stdout.write(text)
        raise SystemExit(0)

    def default(self, argv: Sequence[str]) -> C:
        """Return the recipe, or the earlier run's configuration, whose fields the flags of `argv` override."""
        if "--resume" in argv:
            return self._earlier_run(_peek(argv, "--run-dir"))
        flags = {word.split("=")[0] for word in argv}
        recipe = _peek(argv, "--recipe") or self.by_flag.get(self._asking(argv) or "", self.default_recipe)
        if self.own_recipe is not None and is_user_code(recipe):
            own = self.own_recipe(recipe, _words_of(argv, "--recipe-options"))
            return self.own_model(own) if "--model" in flags else own
        if recipe not in self.recipes:
            near = difflib.get_close_matches(recipe, self.recipes, n=1)
            meant = f", perhaps you meant {near[0]!r}" if near else ""
            _refuse(f"no recipe {recipe!r}{meant}; there are {', '.join(self.recipes)}")
        if options := _words_of(argv, "--recipe-options"):
            raise SettingsError([f"--recipe-options {options[0]} has no effect: recipe {recipe!r} is no code of yours"])
        return self.own_model(self.recipes[recipe]) if "--model" in flags else self.recipes[recipe]

    def _asking(self, argv: Sequence[str]) -> str | None:
        """Return the flag that decides on the recipe where none is named."""
        return next((flag for flag in self.by_flag if any(word.split("=")[0] == flag for word in argv)), None)

    def _earlier_run(self, named: str | None) -> C:
        directory = Path(named) if named else newest_run(self.runs)
        if directory is None:
            _refuse(f"nothing to resume under {self.runs}; name a run with --run-dir DIR")
        if not (directory / CONFIG_NAME).is_file():
            _refuse(f"nothing to resume in {directory}: it has no {CONFIG_NAME}")
        return load_config(self.kind, directory / CONFIG_NAME)

    def _refuse_other_names(self, argv: Sequence[str]) -> None:
        """Refuse other trainers' names, and names that no flag has, each with ours."""
        known = [flag(path) for path in self._paths if path not in self.owned]
        known += [alias for kind in self.types.values() for alias in aliases_of(kind)]
        owned = {flag(path).removeprefix("--"): text.removeprefix("use ") for path, text in self.owned.items()}
        rest, hints = peer_hints(argv, known, {**self.peers, **owned})
        unknown = [*hints, *unknown_flags(rest, known, self._paths)]
        if unknown:
            _refuse("; ".join(unknown) + f". All flags: {self.prog} {HELP_ALL[0]}")

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
    except (FullDiskError, LostMachineError, FailedStepError, DivergenceError, IdleRunError) as error:
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


def _words_of(argv: Sequence[str], name: str) -> list[str]:
    """Return the words after a flag that takes several, up to the next flag."""
    if name not in argv:
        return []
    rest = argv[argv.index(name) + 1 :]
    return list(itertools.takewhile(lambda word: not word.startswith("--"), rest))


def requested_point(argv: Sequence[str]) -> tuple[str, str | None] | None:
    """Return what `--help-KIND` or `--help-KIND NAME` asks for: an extension point, and code for it."""
    for i, word in enumerate(argv):
        kind = word.removeprefix("--help-")
        if word != kind and any(kind == point.kind for point in POINTS):
            return kind, argv[i + 1] if i + 1 < len(argv) and not argv[i + 1].startswith("--") else None
    return None


def _refuse(*messages: str, status: int = 2) -> NoReturn:
    write_errors(messages)
    raise SystemExit(status)

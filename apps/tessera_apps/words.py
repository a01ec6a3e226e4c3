"""Keyword arguments as the words of a command line."""

import sys
from collections.abc import Iterator, Mapping
from numbers import Number
from operator import attrgetter
from os import PathLike
from typing import Any

from apps.common.cli.command_line import CommandLine
from apps.common.cli.flags import flag, leaves
from apps.common.cli.words import flag_words, hint_of
from apps.tessera_apps.given import give


def words_of(line: CommandLine[Any], settings: Mapping[str, Any]) -> list[str]:
    """Return the words of an app's command line that give these settings.

    Raises:
        ValueError: a value is of a type that no flag takes.
    """
    paths = {flag(path): path for path, _, _ in leaves(line.recipes[line.default_recipe])}
    hints = {name: hint_of(line.kind, path) for name, path in paths.items()}
    return [word for name, value in settings.items() for word in _words(f"--{name.replace('_', '-')}", value, hints)]


def _words(name: str, value: Any, hints: Mapping[str, Any]) -> Iterator[str]:
    if name == "--resume" or name == "--shrink":  # flags without a value, which are no overrides of a recipe
        if value:
            yield name if value is True else f"{name}={value}"
    elif isinstance(value, Mapping) and name not in hints:
        for inner, entry in value.items():
            yield from _words(f"{name}.{inner.replace('_', '-')}", entry, hints)
    elif isinstance(value, Mapping):
        yield from flag_words(name, tuple(f"{key}={entry}" for key, entry in value.items()), tuple)
    elif isinstance(value, bool):
        yield from flag_words(name, value, hints.get(name, bool))
    elif isinstance(value, list | tuple):
        yield from flag_words(name, tuple(_word(name, entry) for entry in value), tuple)
    else:
        yield from flag_words(name, _word(name, value), str)


def _word(name: str, value: Any) -> str:
    """Return a value as one word: a text, a number, a path, None, or the spec of an object that is given itself."""
    if value is None or isinstance(value, str | PathLike | Number):
        return str(value)
    if type(value).__module__ == "builtins" and not callable(value):
        raise ValueError(f"{name.removeprefix('--')} is a {type(value).__name__}: a text, a number, a list or a dict")
    return spec_of(name.removeprefix("--").rpartition(".")[2].replace("-", "_"), value)


def spec_of(name: str, value: Any) -> str:
    """Return the spec by which the parser finds an object: its own module and name, where they lead to it.

    `name`: of an object that has no such name. A script's own functions are in `__main__`, which ranks have too.
    """
    module, place = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module in sys.modules and place:
        try:
            known = attrgetter(place)(sys.modules[module])
        except AttributeError:
            known = None
        if known is value:
            return f"{module}:{place}"
    return give(name, value)

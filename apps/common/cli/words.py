"""Words of a command line that give a configuration: the inverse of the parser."""

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, get_type_hints

from apps.common.cli.flags import changed, flag, plain_type


def recipe_words(config: Any, recipe: Any, needs: Iterable[tuple[str, str]] = ()) -> tuple[str, ...]:
    """Return `--recipe NAME` and the flags of all fields in which `config` differs from its recipe's configuration.

    `needs`: fields that the recipe leaves open, each with the word that stands for a value which is not given.
    """
    words = ["--recipe", config.recipe]
    for path, word in needs:
        if not attrgetter(path)(config):
            words += [flag(path), word]
    for path in changed(config, recipe):
        words += flag_words(flag(path), attrgetter(path)(config), hint_of(type(config), path))
    return tuple(words)


def flag_words(name: str, value: Any, hint: Any) -> Iterator[str]:
    """Yield the words of a flag with a value, of a field with that type."""
    if hint is bool:
        before, _, last = name.removeprefix("--").rpartition(".")
        yield name if value else f"--{before}{'.' if before else ''}no-{last}"
    elif isinstance(value, tuple):
        yield from (name, *map(str, value))
    elif isinstance(value, str) and value.startswith("-"):
        yield f"{name}={value}"
    else:
        yield from (name, str(value))


def hint_of(kind: Any, path: str) -> Any:
    """Return the type of a field by its dotted path."""
    for part in path.split("."):
        kind = plain_type(get_type_hints(kind, include_extras=True)[part])
    return kind

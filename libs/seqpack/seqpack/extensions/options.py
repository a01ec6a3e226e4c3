"""Typed options of user code: words NAME=VALUE, read by the signature of what takes them.

What is chosen by name (a loss, a reward, a sampler, ...) is a function or a class. Those of its parameters that the
caller does not supply are its options: a command line gives them as `--loss-options tau=0.5 mode=fast`, their types and
defaults are those of the signature. Types are str, int, float, bool, Path, a Literal, one of these or None, and tuples
and lists of them (`sizes=1,2,3`). A parameter without an annotation has its default's type.
"""

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

REQUIRED = inspect.Parameter.empty
PLAIN: tuple[type, ...] = (str, int, float, bool, Path)
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class Option:
    """One option: its name, its type, and its default, or REQUIRED."""

    name: str
    type: Any
    default: Any

    def __str__(self) -> str:
        kind = self.type.__name__ if isinstance(self.type, type) and not get_args(self.type) else str(self.type)
        default = "" if self.default is REQUIRED else f" = {self.default!r}"
        return f"{self.name}: {kind.replace('typing.', '')}{default}"


def options_of(target: Callable[..., Any], inputs: Collection[str] = (), first: int = 0) -> tuple[Option, ...]:
    """Return the options of a function or class: its parameters but those that its caller supplies.

    `inputs`: names that the caller may supply. `first`: how many leading parameters it supplies by position.

    Raises:
        ValueError: an option has a type that a word can't give, or an annotation that can't be read.
    """
    try:
        parameters = list(inspect.signature(target).parameters.values())[first:]
    except ValueError:  # of some functions in C nobody knows
        return ()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [p for p in parameters if p.kind in kinds and p.name not in inputs]
    if not named:
        return ()
    hints = _hints(target)
    options = []
    for parameter in named:
        default = parameter.default
        usual = str if default in (REQUIRED, None) else type(default)
        option = Option(parameter.name, hints.get(parameter.name, usual), default)
        if not _readable(option.type) and default is REQUIRED:
            raise ValueError(
                f"its option {option} has a type that NAME=VALUE can't give: use "
                f"{', '.join(plain.__name__ for plain in PLAIN)}, Literal, tuples of them, or give it a default"
            )
        options.append(option)
    return tuple(options)


def read_options(
    flag: str,
    spec: str,
    target: Callable[..., Any],
    words: Sequence[str],
    inputs: Collection[str] = (),
    first: int = 0,
) -> dict[str, Any]:
    """Return the values that `words` give to the options of `target` (see `options_of`), by name.

    `flag`: the flag that the words come from, `spec`: the name of the target, both for errors.

    Raises:
        ValueError: a word is no NAME=VALUE, names no option or one twice, or has a value of another type; or an option
            without a default is missing. The text tells all of it, and lists the options.
    """
    options = {option.name: option for option in options_of(target, inputs, first)}
    values, problems = _read(words, options)
    missing = [name for name, option in options.items() if option.default is REQUIRED and name not in values]
    if missing and not problems:
        problems.append(f"{', '.join(missing)} must be given")
    if problems:
        has = f"its options: {', '.join(map(str, options.values()))}" if options else "it has no options"
        raise ValueError(f"{flag}: {'; '.join(problems)} ({spec}; {has})")
    return values


def _read(words: Sequence[str], options: Mapping[str, Option]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of words by name, and what is wrong with others."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            problems.append(f"{word!r} is not NAME=VALUE")
        elif name not in options:
            near = difflib.get_close_matches(name, options, n=1)
            problems.append(f"there is no option {name!r}" + (f", did you mean {near[0]}?" if near else ""))
        elif name in values:
            problems.append(f"{name} is given twice")
        else:
            try:
                values[name] = _value(text, options[name].type)
            except ValueError:
                problems.append(f"{options[name]} can't be {text!r}")
    return values, problems


def bound(
    flag: str,
    spec: str,
    target: Callable[..., Any],
    words: Sequence[str],
    inputs: Collection[str] = (),
    first: int = 0,
) -> Callable[..., Any]:
    """Return `target` with the options that `words` give it; see `read_options`."""
    make = _bound if isinstance(target, Hashable) else _bound.__wrapped__
    made: Callable[..., Any] = make(flag, spec, target, tuple(words), tuple(inputs), first)
    return made


@functools.lru_cache(maxsize=64)  # asked for once a micro-batch
def _bound(
    flag: str, spec: str, target: Callable[..., Any], words: tuple[str, ...], inputs: tuple[str, ...], first: int
) -> Callable[..., Any]:
    values = read_options(flag, spec, target, words, inputs, first)
    return functools.partial(target, **values) if values else target


def split_words(
    targets: Mapping[str, Callable[..., Any]], words: Sequence[str], inputs: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Return the words of each of several targets by its spec: those that name an option of it, and those that name
    an option of none, which `read_options` refuses."""
    names = {spec: {option.name for option in options_of(target, inputs)} for spec, target in targets.items()}
    known = set().union(*names.values())
    return {
        spec: tuple(word for word in words if (name := word.partition("=")[0]) in own or name not in known)
        for spec, own in names.items()
    }


def inputs_of(target: Callable[..., Any], inputs: Collection[str]) -> tuple[str, ...]:
    """Return those of `inputs` that a function names among its parameters; all where it takes any keyword."""
    parameters = inspect.signature(target).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return tuple(inputs)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return tuple(name for name in inputs if name in names)


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    plain = target.func if isinstance(target, functools.partial) else target
    described: Any = plain.__init__ if inspect.isclass(plain) else plain
    if not (inspect.isfunction(described) or inspect.ismethod(described)):
        described = type(plain).__call__  # of an object that can be called
    try:
        return get_type_hints(described)
    except NameError as error:
        raise ValueError(f"an annotation of its options can't be read: {error}") from error


def _readable(kind: Any) -> bool:
    if kind in PLAIN or kind is type(None):
        return True
    origin, args = get_origin(kind), [arg for arg in get_args(kind) if arg is not Ellipsis]
    if origin is Literal:
        return True
    return origin in (Union, types.UnionType, tuple, list, Sequence) and bool(args) and all(map(_readable, args))


def _value(text: str, kind: Any) -> Any:
    """Return the value of a text for a type; ValueError where it is none of it."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is bool:
        return _one_of(text.lower(), BOOLEANS)
    if kind is type(None):
        return _one_of(text, {"None": None, "none": None})
    if kind in (str, int, float, Path):
        return kind(text)
    if origin is Literal:
        return _one_of(text, {str(choice): choice for choice in args})
    if origin in (Union, types.UnionType):
        return _first_that_reads(text, args)
    if origin in (tuple, list) or kind in (tuple, list):
        inner = args[0] if args else str
        values = [_value(part, inner) for part in text.split(",") if part]
        return tuple(values) if (origin or kind) is tuple else values
    raise ValueError(f"no text gives a {kind}")


def _one_of(text: str, choices: Mapping[str, Any]) -> Any:
    if text not in choices:
        raise ValueError(f"{text!r} is none of {', '.join(choices)}")
    return choices[text]


def _first_that_reads(text: str, kinds: Sequence[Any]) -> Any:
    for kind in sorted(kinds, key=lambda one: one is str):  # a str takes anything
        try:
            return _value(text, kind)
        except ValueError:
            continue
    raise ValueError(f"{text!r} is none of {kinds}")

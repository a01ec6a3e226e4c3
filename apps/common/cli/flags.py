"""The command line's view of a configuration: the same fields, some with other choices, some without a flag.

A library's dataclass is nested in an app's as it is. Some of its fields are the app's own business (the model's path is
--model), others the app must refuse: neither stands in --help. `flag_type` makes a subclass whose annotations say so
for the parser alone and checks nothing, `as_type` carries values from one class to the other and tells at once all that
is wrong in any part, and `check_owned` refuses such fields wherever a configuration is made.

What a class of settings has for that, where it can say more than the first thing that is wrong:

- `problems()`: texts of all that is wrong, each beginning with the field's name; making one raises them in one text.
- `out_of_range()`: those that hold whatever the others are, told where a nested class is wrong itself.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import tyro

from apps.common.cli.flag_names import NAMES as NAMES
from apps.common.cli.flag_names import flag as flag

C = TypeVar("C")


class SettingsError(ValueError):
    """Several errors of a user's settings, each a text of its own."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = tuple(lines)
        super().__init__("; ".join(self.lines))


def flag_type(kind: type[C], owned: Mapping[str, str], types: Mapping[str, Any], prefix: str = "") -> type[C]:
    """Return a subclass of `kind` for the parser, nested classes likewise; it takes any values and checks none.

    `owned`: dotted paths of fields without a flag, such as "engine.model" (see `check_owned`). `types`: paths of fields
    whose flags have another type than the field, such as a Literal of the choices. `prefix`: of a nested class's paths.

    Raises:
        ValueError: there is no such field.
    """
    hints = get_type_hints(kind, include_extras=True)
    unknown = {path.partition(".")[0] for path in (*owned, *types)} - set(hints)
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {', '.join(sorted(unknown))}")
    annotations: dict[str, Any] = {}
    for name, hint in hints.items():
        inner_owned, inner_types = _below(owned, name), _below(types, name)
        if name in owned:
            annotations[name] = Annotated[hint, tyro.conf.Suppress, tyro.conf.Fixed]
        elif isinstance(plain := plain_type(hint), type) and is_dataclass(plain):
            view = flag_type(plain, inner_owned, inner_types, f"{prefix}{name}.")
            annotations[name] = Annotated[(view, *hint.__metadata__)] if plain is not hint else view
        else:
            annotations[name] = _with_name(prefix + name, types.get(name, hint))
    own = {"__doc__": kind.__doc__, "__annotations__": annotations, "__post_init__": _unchecked}
    return type(kind.__name__, (kind,), own)


def as_type(value: Any, kind: type[C]) -> C:
    """Return the values as an instance of `kind` (the class of `value`, a subclass or a base), nested ones likewise.

    Raises:
        SettingsError: values that can't be, of all parts together, each with its flag.
    """
    problems: list[str] = []
    result: C | None = _built(value, kind, "", problems)
    if result is None:
        raise SettingsError(problems)
    return result


def _built(value: Any, kind: Any, prefix: str, problems: list[str]) -> Any:
    """Return an instance of `kind`; or None, with what is wrong added to `problems`."""
    hints, before = get_type_hints(kind), len(problems)
    inner = {field.name: getattr(value, field.name) for field in fields(value)}
    for name, entry in inner.items():
        if is_dataclass(hints[name]):
            inner[name] = _built(entry, hints[name], f"{prefix}{name}.", problems)
    if len(problems) > before:  # what is wrong beside a wrong part can't be told from what follows from it
        texts = list(value.out_of_range()) if hasattr(value, "out_of_range") else []
    else:
        texts = list(value.problems()) if hasattr(value, "problems") else []
        if not texts:
            try:
                return kind(**inner)
            except ValueError as error:
                texts = [str(error)]
    problems += (_with_flag(text, inner, prefix) for text in texts)
    return None


def _with_flag(text: str, names: Iterable[str], prefix: str) -> str:
    """Return the text with the flag of the field it begins with, or else the flag of the part, unless it names one."""
    head = re.match(r"\w*", text)
    if head and head[0] in names:
        return flag(prefix + head[0]) + text[head.end() :]
    return text if "--" in text or not prefix else f"{flag(prefix[:-1])}: {text}"


def _unchecked(_: Any) -> None:
    """Replace the checks of a class."""


def check_owned(config: Any, owned: Mapping[str, str]) -> None:
    """Raise ValueError for fields that the app sets itself or never takes; `owned` says by path what to use instead.

    Raises:
        ValueError: some of them are not at their class's default.
    """
    if problems := [*owned_problems(config, owned)]:
        raise ValueError("; ".join(problems))


def owned_problems(config: Any, owned: Mapping[str, str]) -> Iterator[str]:
    """Yield one text for each such field (see `check_owned`)."""
    for path, value, default in leaves(config):
        if path in owned and value != default:
            yield f"{flag(path)} is not for you to set: {owned[path]}"


def _with_name(path: str, kind: Any) -> Any:
    """Return the type of a field's flag, with the flag's name."""
    return Annotated[kind, tyro.conf.arg(name=flag(path).removeprefix("--"), prefix_name=False)]


def aliases_of(kind: Any) -> list[str]:
    """Return further names of a flag, of its type."""
    extra = kind.__metadata__ if get_origin(kind) is Annotated else ()
    return [alias for one in extra for alias in getattr(one, "aliases", None) or ()]


def name_or_file(names: Iterable[str], **options: Any) -> Any:
    """Return the type of a field that takes one of some names, or a user's code; the field's class checks it.

    `options`: of the flag, as `tyro.conf.arg` takes them.
    """
    return Annotated[str, tyro.conf.arg(metavar=f"{{{','.join(names)}}}|FILE.py:NAME", **options)]


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted path, value, its class's default or MISSING) of every field of a configuration and its parts."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value, _default(field)


def changed(config: Any, other: Any) -> list[str]:
    """Return the dotted paths at which two configurations of one class differ."""
    return [path for (path, left, _), (_, right, _) in zip(leaves(config), leaves(other), strict=True) if left != right]


def _below(paths: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {path.removeprefix(f"{name}."): value for path, value in paths.items() if path.startswith(f"{name}.")}


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def plain_type(hint: Any) -> Any:
    """Return a type hint without its `Annotated`."""
    return hint.__origin__ if get_origin(hint) is Annotated else hint

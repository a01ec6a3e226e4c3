"""The command line's view of a configuration: the same fields, some with other choices, some without a flag.

A library's dataclass is nested in an app's as it is. Some of its fields are the app's own business (the model's path is
--model), others the app must refuse: neither stands in --help. `flag_type` makes a subclass whose annotations say so
for the parser alone, `as_type` carries values from one class to the other, and `check_owned` refuses such fields
wherever a configuration is made.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import tyro

C = TypeVar("C")


def flag_type(kind: type[C], owned: Mapping[str, str], types: Mapping[str, Any]) -> type[C]:
    """`kind` as the command line shows it.

    `owned`: dotted paths of fields without a flag, such as "engine.model" (see `check_owned`). `types`: paths of fields
    whose flags have another type than the field, such as a Literal of the choices.

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
        elif name in types:
            annotations[name] = types[name]
        elif inner_owned or inner_types:
            plain = hint.__origin__ if get_origin(hint) is Annotated else hint
            view = flag_type(plain, inner_owned, inner_types)
            annotations[name] = Annotated[(view, *hint.__metadata__)] if plain is not hint else view
    return type(kind.__name__, (kind,), {"__doc__": kind.__doc__, "__annotations__": annotations})


def as_type(value: Any, kind: type[C]) -> C:
    """The same values as an instance of `kind`: the class of `value`, a subclass or a base; nested ones likewise."""
    hints = get_type_hints(kind)
    inner = {field.name: getattr(value, field.name) for field in fields(value)}
    for name, entry in inner.items():
        if is_dataclass(hints[name]):
            inner[name] = as_type(entry, hints[name])
    return kind(**inner)


def check_owned(config: Any, owned: Mapping[str, str]) -> None:
    """Refuse fields that the app sets itself or never takes: `owned` says by dotted path what to use instead.

    Raises:
        ValueError: one of them is not at its class's default.
    """
    for path, value, default in leaves(config):
        if path in owned and value != default:
            raise ValueError(f"{flag(path)} is not for you to set: {owned[path]}")


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, value, its class's default or MISSING) of every field of a configuration and of those it nests."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value, _default(field)


def changed(config: Any, other: Any) -> list[str]:
    """The dotted paths at which two configurations of one class differ."""
    return [path for (path, left, _), (_, right, _) in zip(leaves(config), leaves(other), strict=True) if left != right]


def flag(path: str) -> str:
    """The flag of a dotted path; the fields of `data` and of `own` stand at the top."""
    return "--" + path.removeprefix("data.").removeprefix("own.").replace("_", "-")


def _below(paths: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {path.removeprefix(f"{name}."): value for path, value in paths.items() if path.startswith(f"{name}.")}


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default

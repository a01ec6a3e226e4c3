"""Tool schemas from typed Python functions with docstrings."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Literal, Union, get_args, get_origin

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_NAMED = re.compile(r"^\s*(?:\*\*?)?(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_FIELD = re.compile(r"^\s*:param\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)$")
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?)\s*:\s*$")


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the OpenAI-style schema of a typed function, for chat templates and APIs.

    The description is the docstring's first part; arguments are described by an `Args:` section or `:param name:`
    lines, or by `Annotated[type, "description"]`. Understood: str, int, float, bool, None, Any, Literal, Enum, lists,
    tuples, sets, dicts with str keys, unions, dataclasses, TypedDicts. ValueError names what cannot be described.
    """
    if not callable(function):
        raise ValueError(f"a tool must be a schema dict or a typed function, not {function!r}")
    name = getattr(function, "__name__", type(function).__name__)
    hints = typing.get_type_hints(
        function if inspect.isroutine(function) else type(function).__call__, include_extras=True
    )
    description, described = read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        key = parameter.name
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"tool {name!r}: argument {key!r} cannot be given by name; make it an ordinary argument")
        if key not in hints:
            raise ValueError(f"tool {name!r}: argument {key!r} has no type; annotate it, such as {key}: str")
        schema = type_schema(hints[key], f"tool {name!r}: argument {key!r}")
        if described.get(key):
            schema.setdefault("description", described[key])
        if parameter.default is inspect.Parameter.empty:
            required.append(key)
        properties[key] = schema
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def type_schema(hint: Any, where: str = "the type") -> dict[str, Any]:
    """Return the JSON Schema of a type; ValueError, beginning with `where`, for one that has none."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is typing.Annotated:
        schema = type_schema(arguments[0], where)
        texts = [extra for extra in arguments[1:] if isinstance(extra, str)]
        return {**schema, "description": texts[0]} if texts else schema
    if hint is Any or hint is object or hint is inspect.Parameter.empty:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if hint is None:
        return {"type": "null"}
    if origin is Literal:
        return _choice(list(arguments), where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choice([member.value for member in hint], where)
    if origin in (Union, types.UnionType):
        return {"anyOf": [type_schema(part, where) for part in arguments]}
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or typing.is_typeddict(hint)):
        return _record(hint, where)
    return _container(origin or hint, arguments, hint, where)


def _choice(values: list[Any], where: str) -> dict[str, Any]:
    kinds = sorted({_SCALARS.get(type(value), "") for value in values})
    if "" in kinds:
        raise ValueError(f"{where}: choices must be strings, numbers, booleans or None, not {values!r}")
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _record(hint: Any, where: str) -> dict[str, Any]:
    hints = typing.get_type_hints(hint, include_extras=True)
    if dataclasses.is_dataclass(hint):
        missing = dataclasses.MISSING
        fields = dataclasses.fields(hint)
        required = [f.name for f in fields if f.default is missing and f.default_factory is missing]
    else:
        required = sorted(hint.__required_keys__, key=list(hints).index)
        hints = {
            k: get_args(v)[0] if get_origin(v) in (typing.Required, typing.NotRequired) else v for k, v in hints.items()
        }
    properties = {key: type_schema(part, f"{where}, {key!r}") for key, part in hints.items()}
    return {"type": "object", "properties": properties, "required": required}


def _container(origin: Any, arguments: tuple[Any, ...], hint: Any, where: str) -> dict[str, Any]:
    if isinstance(origin, type) and issubclass(origin, tuple):
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return {"type": "array", "items": type_schema(arguments[0], where)}
        parts = [type_schema(part, where) for part in arguments]
        return {"type": "array", "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if arguments and arguments[0] is not str:
            raise ValueError(f"{where}: the keys of {hint} must be str, as JSON has no others")
        extra = type_schema(arguments[1], where) if arguments else {}
        return {"type": "object", **({"additionalProperties": extra} if extra else {})}
    if isinstance(origin, type) and issubclass(origin, Sequence | Set) and origin not in (bytes, bytearray, memoryview):
        items = type_schema(arguments[0], where) if arguments else {}
        return {"type": "array", **({"items": items} if items else {})}
    raise ValueError(
        f"{where}: {hint!r} has no JSON Schema; use str, int, float, bool, list, dict, Literal or a dataclass"
    )


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into its description and that of each argument."""
    head: list[str] = []
    described: dict[str, str] = {}
    section, current, indent = "", "", 0
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            section, current = heading[1], ""
            continue
        field = _FIELD.match(line)
        if field:
            section, current, indent = "param", field[1], _indent(line)
            described[current] = field[2].strip()
        elif section in ("Args", "Arguments", "Parameters", "param"):
            named = _NAMED.match(line) if section != "param" else None
            if named and (not current or _indent(line) <= indent):
                current, indent = named[1], _indent(line)
                described[current] = named[2].strip()
            elif not line.strip():
                current = ""
            elif current and _indent(line) > indent:
                described[current] = f"{described[current]} {line.strip()}".strip()
        elif not section and not re.match(r"^\s*:\w+", line):
            head.append(line.strip())
    return " ".join(part for part in head if part), described


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())

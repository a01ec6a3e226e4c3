"""Arguments by JSON Schema: text to typed values, and notes on values that do not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from chat_tools.parsing.literals import MAX_NOTES, LiteralError, loads, note
from chat_tools.parsing.tool_schema import function_schema

_MAX_DEPTH = 32
_MAX_ITEMS = 10_000  # of a list whose items are more than a type, no more are looked at
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
_EXACT: dict[str | None, type] = {name: types[0] for name, types in _TYPES.items()}
_ALIASES = {
    "str": "string", "text": "string", "varchar": "string", "char": "string", "enum": "string",
    "int": "integer", "long": "integer", "float": "number", "double": "number", "bool": "boolean",
    "dict": "object", "map": "object", "list": "array", "tuple": "array", "none": "null",
}  # fmt: skip

Schema = Mapping[str, Any]
Written = tuple[str, str, bool | None]
"""An argument as it was written: its key, its text, and whether the model says that it is text (None: it does not)."""
_ANNOTATIONS = frozenset({"type", "description", "title", "default", "examples"})


def tool_dict(tool: Any) -> Mapping[str, Any]:
    """Return a tool's schema, made from the function if it is one."""
    if _is_mapping(tool):
        return tool
    return function_schema(tool)


class ToolSet:
    """The parameters of each tool by name, from OpenAI-style dicts or typed Python functions."""

    def __init__(self, tools: Sequence[Any] | None) -> None:
        self.parameters: dict[str, Schema] = {}
        self.given = tools is not None
        for tool in tools or ():
            schema = tool_dict(tool)
            function = schema.get("function", schema)
            if not _is_mapping(function) or not isinstance(function.get("name"), str):
                raise ValueError(
                    'a tool must be a typed function or {"type": "function", "function": {"name": ..., "parameters": '
                    f"{{...}}}}}}, not {tool!r}"
                )
            parameters = function.get("parameters", function.get("input_schema"))
            self.parameters[function["name"]] = parameters if _is_mapping(parameters) else {}

    def get(self, name: str) -> Schema | None:
        """Return the schema of the tool's arguments, None for a tool that is not there."""
        return self.parameters.get(name)

    def from_texts(self, name: str, pairs: Sequence[Written], notes: list[str], guess: bool = False) -> dict[str, Any]:
        """Convert texts to their types by the tool's schema; the last of duplicate keys counts.

        An undeclared one stays text, unless `guess` is set: then it is JSON if it can be. A value that the model marks
        as text stays as it is; one that it marks as no text is guessed where it is not declared.
        """
        schema = self.get(name)
        properties = _properties(schema)
        values: dict[str, Any] = {}
        for key, text, is_text in pairs:
            if key in values:
                note(notes, f"duplicate key {key!r}: the last one counts")
            if is_text:
                values[key] = text
            elif key in properties:
                values[key] = from_text(text, properties[key], schema or {}, notes, key)
            elif schema is not None and isinstance(schema.get("additionalProperties"), Mapping):
                values[key] = from_text(text, schema["additionalProperties"], schema, notes, key)
            else:
                values[key] = from_text(text, {}, {}, notes, key) if guess or is_text is False else text
        self._check_names(name, values, notes)
        return values

    def check(self, name: str, values: dict[str, Any], notes: list[str]) -> None:
        """Convert typed values (of JSON, say) to the tool's schema where nothing is lost; note those that do not fit.

        A number or boolean where only text fits becomes its JSON text; text that is JSON of a fitting value becomes
        that value. All else stays as the model wrote it. Both get a note.
        """
        schema = self.get(name)
        if schema is not None:
            properties = _properties(schema)
            for key, value in values.items():
                part = properties.get(key)
                if part is not None and type(value) is not _EXACT.get(_plain_type(part)):
                    values[key] = _fitted(value, part, schema, notes, key)
        self._check_names(name, values, notes)

    def _check_names(self, name: str, values: Mapping[str, Any], notes: list[str]) -> None:
        schema = self.get(name)
        if schema is None:
            if self.given:
                notes.append(f"unknown tool {name!r}")
            return
        properties = _properties(schema)
        if properties and not schema.get("additionalProperties") and not values.keys() <= properties.keys():
            for key in values:
                if key not in properties:
                    note(notes, f"unknown argument {key!r}")
        for key in _required(schema):
            if key not in values:
                note(notes, f"missing argument {key!r}")


def _fitted(value: Any, schema: Any, root: Schema, notes: list[str], key: str) -> Any:
    """Return the value, or the scalar of another type that it represents, if only that fits."""
    problems = mismatches(value, schema, root, key)
    if not problems:
        return value
    other = value
    if isinstance(value, str):
        other = from_text(value, schema, root, [], key)
    elif isinstance(value, bool | int | float):
        other = json.dumps(value)
    is_other = type(other) is not type(value) and not isinstance(other, dict | list)
    if is_other and not mismatches(other, schema, root, key):
        note(notes, f"{key}: {_short(value)} taken as {_short(other)}")
        return other
    for problem in problems:
        note(notes, problem)
    return value


def _properties(schema: Schema | None) -> Mapping[str, Any]:
    properties = (schema or {}).get("properties")
    return properties if _is_mapping(properties) else {}


def _is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return type(value) is dict or isinstance(value, Mapping)  # the first is much faster


def _required(schema: Schema) -> list[str]:
    required = schema.get("required")
    return [key for key in required if isinstance(key, str)] if isinstance(required, list) else []


def from_text(text: str, schema: Any, root: Schema, notes: list[str], path: str = "value") -> Any:
    """Return the value of `text` under `schema`.

    A string schema takes the text as it is. Otherwise JSON, then a literal, is read; the value counts if it fits. Text
    that fits nothing comes back as text, with a note.
    """
    plain = _plain_type(schema)
    if plain == "string":
        return text
    types = {plain} if plain else allowed_types(schema, root)
    if types == {"string"}:
        return _as_string(text, schema, root, notes, path)
    remarks: list[str] = []
    try:
        value = loads(text, remarks)
    except LiteralError:
        value, remarks = _by_word(text, types), []
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        value = int(value)
    text_is_better = "string" in types and isinstance(value, str)
    problems = mismatches(value, schema, root, path)
    if not problems and not text_is_better:
        for remark in remarks:
            note(notes, remark)
        return value
    if not mismatches(text, schema, root, path):
        return text
    if isinstance(value, dict | list) and types & {"object", "array"} and _is_type(value, types):
        for remark in (*remarks, *problems):
            note(notes, remark)
        return value
    note(notes, f"{(problems or mismatches(text, schema, root, path))[0]}; kept as text")
    return text


def _plain_type(schema: Any) -> str | None:
    """Return the type of a schema that is no more than one type, else None: a shortcut for the usual case."""
    if type(schema) is not dict or not schema.keys() <= _ANNOTATIONS:
        return None
    kind = schema.get("type")
    return kind if isinstance(kind, str) and kind in _TYPES else None


def _as_string(text: str, schema: Any, root: Schema, notes: list[str], path: str) -> str:
    problems = mismatches(text, schema, root, path)
    if problems and text.strip() != text and not mismatches(text.strip(), schema, root, path):
        return text.strip()
    notes.extend(problems)
    return text


def _by_word(text: str, types: set[str]) -> Any:
    """Read true, false and null in upper or lower case; all else stays text."""
    word = text.strip().lower() if "string" not in types else ""
    if "boolean" in types and word in ("true", "false"):
        return word == "true"
    if "null" in types and word in ("null", "none"):
        return None
    return text


def resolve(schema: Any, root: Schema) -> Schema:
    """Follow local `$ref`s ("#/$defs/..."); what cannot be followed allows anything."""
    if type(schema) is dict and "$ref" not in schema:
        return schema
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        node: Any = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
        schema = node
    return {}


def allowed_types(schema: Any, root: Schema, depth: int = 0) -> set[str]:
    """Return the JSON types that a value under `schema` may have."""
    schema = resolve(schema, root)
    every = set(_TYPES)
    if depth > _MAX_DEPTH:
        return every
    types = set(every)
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind] if isinstance(kind, str) else []
    named = {_type_name(k) for k in kinds if isinstance(k, str)} & every
    if named:
        types = named | ({"null"} if schema.get("nullable") is True else set())
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            types &= {t for t in every for value in values if _is_type(value, {t})}
    for union in ("anyOf", "oneOf"):
        if isinstance(schema.get(union), list):
            types &= set().union(*(allowed_types(part, root, depth + 1) for part in schema[union]))
    if isinstance(schema.get("allOf"), list):
        for part in schema["allOf"]:
            types &= allowed_types(part, root, depth + 1)
    return types


def mismatches(value: Any, schema: Any, root: Schema, path: str, depth: int = 0) -> list[str]:
    """List the mismatches of `value` with `schema`: types, enums, unions, items, properties; [] if it fits."""
    plain = _plain_type(schema)
    if plain:
        return [] if _is_type(value, {plain}) else [f"{path}: {_short(value)} is not {plain}"]
    schema = resolve(schema, root)
    if depth > _MAX_DEPTH or not schema:
        return []
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list) and not any(_same(value, v) for v in values):
            return [f"{path}: {_short(value)} is not one of {_short(values)}"]
    types = allowed_types(schema, root)
    if not _is_type(value, types):
        return [f"{path}: {_short(value)} is not {_words(types)}"]
    for union in ("anyOf", "oneOf"):
        parts = schema.get(union)
        if isinstance(parts, list) and parts:
            tried = [mismatches(value, part, root, path, depth + 1) for part in parts]
            if all(tried):
                return min(tried, key=len)
    problems: list[str] = []
    for part in schema.get("allOf") or ():
        problems += mismatches(value, part, root, path, depth + 1)
    if isinstance(value, list):
        problems += _item_mismatches(value, schema, root, path, depth)
    if isinstance(value, dict):
        problems += _property_mismatches(value, schema, root, path, depth)
    return problems


def _item_mismatches(value: list[Any], schema: Schema, root: Schema, path: str, depth: int) -> list[str]:
    prefix = schema.get("prefixItems")
    first = prefix if isinstance(prefix, list) else []
    rest = schema.get("items")
    problems: list[str] = []
    if not first and _all_of_types(value, rest):
        return problems
    for i, item in enumerate(value[:_MAX_ITEMS]):
        part = first[i] if i < len(first) else rest
        if part is not None:
            problems += mismatches(item, part, root, f"{path}[{i}]", depth + 1)
        if len(problems) > MAX_NOTES:
            break
    return problems


def _all_of_types(values: Sequence[Any], schema: Any) -> bool:
    """Return whether a schema asks for nothing but types, and all values have them: the usual case, fast."""
    names = only_types(schema)
    return names is not None and set(map(type, values)) <= {kind for name in names for kind in _TYPES[name]}


def only_types(schema: Any) -> set[str] | None:
    """Return the types of a schema without other keywords, None for others."""
    plain = _plain_type(schema)
    if plain is not None:
        return {plain}
    if type(schema) is not dict:
        return None
    (key, *others) = [*schema.keys() - (_ANNOTATIONS - {"type"}), None]
    parts = schema.get(key)
    if others != [None] or not isinstance(parts, list):
        return None
    if key == "type":
        return set(parts) if all(isinstance(part, str) and part in _TYPES for part in parts) else None
    types = [only_types(part) for part in parts] if key in ("anyOf", "oneOf") else [None]
    return None if None in types else set().union(*(part for part in types if part))


def _property_mismatches(value: dict[str, Any], schema: Schema, root: Schema, path: str, depth: int) -> list[str]:
    properties = _properties(schema)
    extra = schema.get("additionalProperties")
    problems = [f"{path}: missing {key!r}" for key in _required(schema) if key not in value]
    for key, item in value.items():
        if len(problems) > MAX_NOTES:
            break
        if key in properties:
            problems += mismatches(item, properties[key], root, f"{path}.{key}", depth + 1)
        elif extra is False:
            problems.append(f"{path}: unknown {key!r}")
        elif isinstance(extra, Mapping):
            problems += mismatches(item, extra, root, f"{path}.{key}", depth + 1)
    return problems


def _type_name(name: str) -> str:
    lower = name.lower()
    return _ALIASES.get(lower, lower)


def _is_type(value: Any, types: set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return True
    return any(isinstance(value, _TYPES[t]) for t in types)


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _words(types: set[str]) -> str:
    return " or ".join(t for t in _TYPES if t in types) or "anything"

import enum
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from chat_tools.parsing.tool_schema import function_schema, read_docstring, type_schema


class Unit(enum.Enum):
    METRE = "m"
    MILE = "mi"


@dataclass
class Place:
    name: str
    height: float = 0.0


class Query(TypedDict):
    text: str
    limit: NotRequired[int]


def search(
    query: str,
    limit: int = 10,
    unit: Unit = Unit.METRE,
    tags: list[str] | None = None,
    near: Annotated[Place | None, "where to look"] = None,
) -> str:
    """Search the index.

    Words are joined by "and".

    Args:
        query: what to look for,
            in words
        limit (int): how many: at most

    Returns:
        query: not an argument
    """
    return query


def test_a_whole_function() -> None:
    assert function_schema(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": 'Search the index. Words are joined by "and".',
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for, in words"},
                    "limit": {"type": "integer", "description": "how many: at most"},
                    "unit": {"type": "string", "enum": ["m", "mi"]},
                    "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
                    "near": {
                        "anyOf": [
                            {
                                "type": "object",
                                "properties": {"name": {"type": "string"}, "height": {"type": "number"}},
                                "required": ["name"],
                            },
                            {"type": "null"},
                        ],
                        "description": "where to look",
                    },
                },
                "required": ["query"],
            },
        },
    }


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (Any, {}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (dict, {"type": "object"}),
        (set[str], {"type": "array", "items": {"type": "string"}}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (Literal["a", 1], {"type": ["integer", "string"], "enum": ["a", 1]}),
        (
            tuple[int, str],
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2},
        ),
        (
            Query,
            {
                "type": "object",
                "properties": {"text": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["text"],
            },
        ),
    ],
)
def test_types(hint: Any, schema: Any) -> None:
    assert type_schema(hint) == schema


def test_sphinx_fields() -> None:
    text = "Do it.\n\n:param int a: the first,\n    and more\n:param b: the second\n:returns: nothing"
    assert read_docstring(text) == ("Do it.", {"a": "the first, and more", "b": "the second"})


def untyped(a):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    return a


def positional(a: int, /) -> int:
    return a


def starred(*a: int) -> None: ...


def opaque(a: complex) -> None: ...


def keyed(a: dict[int, str]) -> None: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (untyped, "annotate it"),
        (positional, "by name"),
        (starred, "by name"),
        (opaque, "no JSON Schema"),
        (keyed, "must be str"),
        (3, "typed function"),
    ],
)
def test_errors_name_the_fix(function: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        function_schema(function)

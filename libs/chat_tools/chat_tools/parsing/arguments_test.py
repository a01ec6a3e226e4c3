import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_tools.parsing.arguments import ToolSet, allowed_types, from_text, mismatches
from chat_tools.parsing.literals import LiteralError, dumps, loads

INTEGERS = {"type": "array", "items": {"type": "integer"}}
NULLABLE = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": ["integer", "null"]}, "tags": INTEGERS},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("1", {"type": "integer"}, 1),
        (" 7 \n", {"type": "integer"}, 7),
        ("3.0", {"type": "integer"}, 3),
        ("1_000", {"type": "integer"}, 1000),
        ("3.5", {"type": "number"}, 3.5),
        ("-2", {"type": "number"}, -2),
        ("true", {"type": "boolean"}, True),
        ("FALSE", {"type": "boolean"}, False),
        ("null", NULLABLE, None),
        ("None", NULLABLE, None),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": "string", "nullable": True}, None),
        ("1", {"type": "string"}, "1"),
        ('"quoted"', {"type": "string"}, '"quoted"'),
        (" spaces ", {"type": "string"}, " spaces "),
        ("[1, 2]", INTEGERS, [1, 2]),
        ("(1, 2)", INTEGERS, [1, 2]),
        ("['a', None, True]", {"type": "array"}, ["a", None, True]),
        ('{"a": {"b": [1]}}', {"type": "object"}, {"a": {"b": [1]}}),
        ("{'a': 1}", {"type": "object"}, {"a": 1}),
        ("b", {"enum": ["a", "b"]}, "b"),
        ("\nb\n", {"type": "string", "enum": ["a", "b"]}, "b"),
        ("2", {"enum": [1, 2]}, 2),
        ("5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 5),
        ("five", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "five"),
        ('{"name": "x", "age": null}', PERSON, {"name": "x", "age": None}),
        ("[1]", {"$ref": "#/$defs/ints"}, [1]),
        ("x", {}, "x"),
        ("[1]", {}, [1]),
        ("1", {"type": "int"}, 1),
    ],
)
def test_what_fits_gets_its_type(text: str, schema: dict[str, Any], value: Any) -> None:
    notes: list[str] = []
    found = from_text(text, schema, {"$defs": {"ints": INTEGERS}}, notes)
    assert (found, type(found)) == (value, type(value))
    assert not notes


@pytest.mark.parametrize(
    ("text", "schema", "note"),
    [
        ("null", {"type": "integer"}, "value: None is not integer; kept as text"),
        ("yes", {"type": "boolean"}, "value: 'yes' is not boolean; kept as text"),
        ("3.5", {"type": "integer"}, "value: 3.5 is not integer; kept as text"),
        ("true", {"type": "integer"}, "value: True is not integer; kept as text"),
        ("1e999", {"type": "number"}, "value: '1e999' is not number; kept as text"),
        ("NaN", {"type": "number"}, "value: 'NaN' is not number; kept as text"),
        ("9" * 5000, {"type": "integer"}, "is not integer; kept as text"),
        ("[1, 2", INTEGERS, "value: '[1, 2' is not array; kept as text"),
        ("{1, 2}", INTEGERS, "value: '{1, 2}' is not array; kept as text"),
        ("b'x'", {"type": "array"}, "is not array; kept as text"),
        ("f(1)", {"type": "object"}, "is not object; kept as text"),
        ("c", {"enum": ["a", "b"]}, "value: 'c' is not one of ['a', 'b']"),
        ("1", {"enum": [True]}, "value: 1 is not one of [True]; kept as text"),
    ],
)
def test_what_does_not_fit_stays_text_with_a_note(text: str, schema: dict[str, Any], note: str) -> None:
    notes: list[str] = []
    assert from_text(text, schema, {}, notes) == text
    assert len(notes) == 1
    assert note in notes[0]


def test_nested_misfits_keep_the_value_and_say_where() -> None:
    notes: list[str] = []
    text = '{"age": "x", "tags": [1, "2"], "other": 1}'
    assert from_text(text, PERSON, {}, notes, "who") == json.loads(text)
    assert notes == [
        "who: missing 'name'",
        "who.age: 'x' is not integer or null",
        "who.tags[1]: '2' is not integer",
        "who: unknown 'other'",
    ]


def test_schemas_that_refer_to_themselves() -> None:
    root = {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
    assert not mismatches([[[]], []], {"$ref": "#/$defs/tree"}, root, "t")
    assert mismatches([[1]], {"$ref": "#/$defs/tree"}, root, "t") == ["t[0][0]: 1 is not array"]
    loop = {"$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert from_text("x", {"$ref": "#/$defs/a"}, loop, []) == "x"


def test_all_of_narrows() -> None:
    schema = {"allOf": [{"type": ["integer", "string"]}, {"type": ["string", "null"]}]}
    assert allowed_types(schema, {}) == {"string"}


def test_tools_in_every_shape() -> None:
    def ping(times: int = 1) -> None:
        """Ping."""

    tools = ToolSet([ping, {"name": "flat", "parameters": {}}, {"type": "function", "function": {"name": "full"}}])
    assert set(tools.parameters) == {"ping", "flat", "full"}
    with pytest.raises(ValueError, match="typed function"):
        ToolSet([{"description": "no name"}])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=120, deadline=None)
@given(json_values)
def test_literals_are_read_as_python_writes_them(value: Any) -> None:
    assert loads(repr(value)) == value
    assert loads(json.dumps(value)) == value
    assert json.loads(dumps(value)) == value


@settings(max_examples=250, deadline=None)
@given(st.text(alphabet="[]{}()'\",:0123456789.eEtrufalsn \\-+_xN\n", max_size=40))
def test_any_text_is_a_value_or_an_error(text: str) -> None:
    try:
        value = loads(text)
    except LiteralError:
        return
    json.loads(dumps(value), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[" * 200 + "]" * 200,
        '{"a":' * 200 + "1" + "}" * 200,
        "{'a':" * 100_000,
        "-" * 100_000,
        "(" * 50 + "1" + "," * 50,
        "1 2",
        "",
    ],
)
def test_hostile_texts_are_errors(text: str) -> None:
    with pytest.raises(LiteralError):
        loads(text)


def test_duplicate_keys_are_noted() -> None:
    for text in ('{"a": 1, "a": 2}', "{'a': 1, 'a': 2}"):
        notes: list[str] = []
        assert loads(text, notes) == {"a": 2}
        assert notes == ["duplicate key 'a': the last one counts"]

"""What is neither JSON nor a literal is known by its beginning; escapes mean what JSON means by them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_tools.parsing.literals import LiteralError, decode_escapes, is_no_value, loads

BITS = [
    "true",
    "None",
    "Fals",
    "e",
    "NaN",
    "-",
    "+",
    ".",
    "1",
    "_",
    " ",
    "u",
    "'",
    '"',
    "[",
    "{",
    "(",
    "é",
    "²",
    "٣",
    "x",
    "\n",
]
texts = st.lists(st.one_of(st.sampled_from(BITS), st.text(max_size=2)), max_size=8).map("".join)


@given(texts, texts)
def test_a_beginning_of_no_value_begins_none(begun: str, rest: str) -> None:
    if is_no_value(begun):
        with pytest.raises(LiteralError):
            loads(begun + rest)


@pytest.mark.parametrize("begun", ["A word", "weather", "3 apples", "# Title", "été", "<b>", "None of", "true-ish,"])
def test_usual_text_is_known_early(begun: str) -> None:
    assert is_no_value(begun)


@given(st.text(max_size=20))
def test_escapes_of_json(text: str) -> None:
    assert decode_escapes(json.dumps(text)[1:-1]) == text

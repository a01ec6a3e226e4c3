"""Values in pieces: a string means what it means as a whole, another value ends where it ends as a whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_tools.parsing.literals import LiteralError, LiteralParser
from chat_tools.parsing.partial_values import PartialString, PartialValue

ESCAPED = [
    "'",
    '"',
    "\\",
    "\\n",
    "\\u",
    "\\u00e9",
    "\\ud83d",
    "\\ude00",
    "\\x4",
    "1",
    "\\U0001F600",
    "\r",
    "\n",
    "é",
    "a",
]
PYTHON = ('"""', "'''", '"', "'")
texts = st.lists(st.one_of(st.sampled_from(ESCAPED), st.text(max_size=3)), max_size=12).map("".join)


def in_pieces(value: PartialString | PartialValue, text: str, size: int) -> tuple[int, str]:
    """Feed the text in pieces; return what was read, by whatever `read` gives, and how many characters."""
    kept, read, said = "", 0, []
    for start in range(0, len(text), size):
        kept += text[start : start + size]
        while kept and not value.ended and not getattr(value, "lost", False):
            got = value.read(kept)
            taken, piece = got if isinstance(got, tuple) else (got, "")
            said.append(piece)
            kept, read = kept[taken:], read + taken
            if not taken:
                break
    return read, "".join(said)


@given(texts, st.sampled_from(PYTHON), st.integers(1, 5))
def test_a_string_in_pieces_means_what_the_whole_means(inside: str, quote: str, size: int) -> None:
    text = f"{quote}{inside}{quote}, "
    if len(quote) == 1 and text.startswith(quote * 3):
        return  # another quote than was meant
    string, parser = PartialString(quote, raw=False), LiteralParser(text, [])
    read, said = in_pieces(string, text[len(quote) :], size)
    try:
        whole = parser.scalar()
    except LiteralError:
        whole = ""
    if parser.pos < 2 * len(quote):  # the last quote is escaped
        assert not string.ended
    elif string.lost:
        assert whole.startswith(said)
        assert any("\ud800" <= character <= "\udfff" for character in whole)
    else:
        assert (read + len(quote), said) == (parser.pos, whole)
        assert string.ended


@given(st.lists(st.sampled_from(["<", "|", '"', ">", '<|"', "\\", "a"]), max_size=12).map("".join), st.integers(1, 5))
def test_between_other_quotes_nothing_is_an_escape(inside: str, size: int) -> None:
    quote = '<|"|>'
    text = inside + quote + "}"
    string = PartialString(quote, raw=True)
    end = text.index(quote)
    assert in_pieces(string, text, size) == (end + len(quote), text[:end])


literals = st.recursive(
    st.one_of(
        texts.map(repr), texts.map(lambda text: f'"""{text.replace(chr(34), "")!r}\n"""'), st.integers().map(str)
    ),
    lambda v: (
        st.lists(v, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.lists(v, max_size=2).map(lambda items: f"({', '.join(items)})")
        | v.map(lambda item: f"{{'a': {item}}}")
    ),
    max_leaves=6,
)


@given(literals, st.sampled_from([",", ")"]), st.integers(1, 5))
def test_a_value_in_pieces_ends_where_the_whole_ends(literal: str, behind: str, size: int) -> None:
    value = PartialValue(PYTHON, ())
    read, _ = in_pieces(value, literal + behind, size)
    assert value.ended
    assert (read, value.text) == (len(literal), literal)


@pytest.mark.parametrize("text", ['[1, <|"|>a, b]', "'", "{'a': (1", "''"])
def test_a_value_without_its_end_has_none(text: str) -> None:
    value = PartialValue(('<|"|>', '"', "'"), ('<|"|>',))
    in_pieces(value, text, 1)
    assert not value.ended

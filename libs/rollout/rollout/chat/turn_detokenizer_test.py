"""A turn's text is the same however its tokens come, and a stop text ends it at the same token."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.chat.turn_detokenizer import TurnDetokenizer
from rollout.testing.chat import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def decode(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids)))


END = encode("<|im_end|>")
TEXTS = st.text("abé😀 \n", max_size=14)
CUTS = st.lists(st.integers(1, 4), max_size=20)


def pieces(ids: list[int], cuts: list[int]) -> Iterator[list[int]]:
    """The ids in pieces of these lengths, the rest as one."""
    for cut in cuts:
        yield ids[:cut]
        ids = ids[cut:]
    yield ids


def by_search(ids: list[int], stops: list[str]) -> tuple[str, int | None]:
    """What a server that looks at the whole text after each token would give: the text, and how many tokens stay."""
    for count in range(1, len(ids) + 1):
        text = decode(ids[:count])
        found = [at for at in map(text.find, stops) if at >= 0]
        if found:
            return text[: min(found)], count
    return decode(ids), None


@given(TEXTS, st.lists(st.text("abé \n", min_size=1, max_size=4), max_size=3), CUTS, st.booleans())
def test_the_pieces_add_up_to_the_text_up_to_the_first_stop_text_that_is_complete(
    text: str, stops: list[str], cuts: list[int], ends: bool
) -> None:
    ids = encode(text)
    reader = TurnDetokenizer(decode, stops, END)
    told = []
    for piece in pieces([*ids, *(END if ends else [])], cuts):
        told.append(reader.feed(piece))
        assert "\ufffd" not in told[-1]  # half a character is not told
    told.append(reader.finish())
    wanted, kept = by_search(ids, stops)
    assert ("".join(told), reader.kept, reader.text) == (wanted, kept, wanted)


@given(st.lists(st.integers(0, 255), max_size=12), CUTS)
def test_bytes_that_are_no_text_are_what_the_decoder_makes_of_them(raw: list[int], cuts: list[int]) -> None:
    byte_ids = [encode(chr(b))[0] if b < 128 else encode("é😀")[b % 6] for b in raw]
    reader = TurnDetokenizer(decode)
    told = "".join(reader.feed(piece) for piece in pieces(byte_ids, cuts))
    assert told + reader.finish() == decode(byte_ids)


@pytest.mark.parametrize(
    ("stops", "told"),
    [
        ([], ["a", "b", "c", "d", ""]),
        (["bcx"], ["a", "", "", "bcd", ""]),
        (["cd"], ["a", "b", "", "", ""]),
        (["abcx", "bc"], ["", "", "a", "", ""]),
    ],
)
def test_text_is_told_as_soon_as_no_stop_text_can_have_begun_in_it(stops: list[str], told: list[str]) -> None:
    reader = TurnDetokenizer(decode, stops)
    assert [*(reader.feed(encode(letter)) for letter in "abcd"), reader.finish()] == told

"""Whose each character is: overlaps, what a message holds, replaced calls, and whole renderings of real families."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_tools.rendering import message_attribution, replaced_messages
from chat_tools.rendering.message_attribution import attribute_messages, printed_parts, texts_of
from chat_tools.rendering.replaced_messages import MessageSpan, common_prefix, common_suffix, find_by_difference
from chat_tools.rendering.template import ChatTemplate
from chat_tools.testing.tokenizer import tiny_tokenizer

words = st.text("ab", max_size=12)


@settings(deadline=None)
@given(words, words)
def test_common_ends(a: str, b: str) -> None:
    lengths = range(min(len(a), len(b)) + 1)
    assert common_prefix(a, b) == max(n for n in lengths if a[:n] == b[:n])
    assert common_suffix(a, b) == max(n for n in lengths if a[len(a) - n :] == b[len(b) - n :])


ROLES = [{"role": "assistant"}, {"role": "user"}, {"role": "assistant"}, {"role": "tool"}]


@pytest.mark.parametrize(
    ("pieces", "kept"),
    [
        ([(0, 5, 0), (3, 8, 1)], [(0, 3, 0), (3, 8, 1)]),  # the assistant's gives way, before
        ([(0, 5, 1), (3, 8, 0)], [(0, 5, 1), (5, 8, 0)]),  # and behind
        ([(0, 5, 0), (5, 8, 1)], [(0, 5, 0), (5, 8, 1)]),
        ([(5, 8, 1), (0, 5, 0)], [(0, 5, 0), (5, 8, 1)]),
        ([(3, 5, 0), (3, 8, 1)], [(3, 8, 1)]),
        ([(0, 9, 1), (3, 5, 0)], [(0, 9, 1), (9, 9, 0)]),
        ([(0, 9, 1), (1, 2, 3), (3, 5, 0)], [(0, 1, 1), (1, 2, 3), (2, 9, 1), (9, 9, 0)]),  # nothing of two others'
        ([(0, 9, 0), (3, 5, 1)], [(0, 3, 0), (3, 5, 1)]),
        ([(0, 2, 0), (2, 6, 0), (1, 4, 1)], [(0, 1, 0), (1, 4, 1), (4, 6, 0)]),
    ],
)
def test_of_two_owners_the_assistant_gives_way(
    pieces: list[tuple[int, int, int]], kept: list[tuple[int, int, int]]
) -> None:
    assert message_attribution._without_overlaps([MessageSpan(*piece) for piece in pieces], ROLES) == [
        MessageSpan(*piece) for piece in kept
    ]


spans = st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(0, 3)).map(
    lambda t: MessageSpan(t[0], t[0] + t[1], t[2])
)


@settings(deadline=None)
@given(st.lists(spans, max_size=5))
def test_kept_pieces_are_in_order_and_take_nothing_from_others(pieces: list[MessageSpan]) -> None:
    kept = message_attribution._without_overlaps(list(pieces), ROLES)
    assert all(a.end <= b.start for a, b in pairwise(kept))
    for piece in kept:
        for at in range(piece.start, piece.end):
            mine = [p.message for p in pieces if p.start <= at < p.end]
            assert piece.message in mine
            if ROLES[piece.message]["role"] == "assistant":
                assert all(ROLES[other]["role"] == "assistant" for other in mine)
    theirs = [p for p in kept if ROLES[p.message]["role"] != "assistant"]
    for piece in pieces:
        if ROLES[piece.message]["role"] != "assistant":
            assert all(any(p.start <= at < p.end for p in theirs) for at in range(piece.start, piece.end))


CALL = {
    "type": "function",
    "id": "7",
    "function": {"name": "f", "arguments": {"x": "one", "y": ["two", {"z": "three"}, 4]}},
}
FLAT = {"name": "g", "arguments": '{"x": "four"}'}


def test_what_a_message_holds() -> None:
    message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "a"}, "b", {"type": "image", "text": 3}, 5],
        "reasoning_content": "c",
        "thinking": {"steps": ["d", "e"]},
        "tool_calls": [CALL, FLAT, "no call", {"function": "none"}],
        "name": "not a text",
    }
    assert texts_of(message) == ["a", "b", "c", "d", "e", "one", "two", "three", '{"x": "four"}']
    assert texts_of({"role": "user", "content": None}) == []
    assert texts_of({"role": "user", "content": "x", "tool_calls": "none"}) == ["x"]
    assert message_attribution.has_text({"content": " \n"}) is False
    assert message_attribution.has_text({"content": " x"}) is True


def test_rewriting_changes_texts_alone() -> None:
    message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "a"}, {"type": "image"}],
        "tool_calls": [CALL, FLAT],
    }
    changed = message_attribution.rewritten(
        message, str.upper, lambda i: lambda text: f"{i}{text}", lambda i: lambda text: f"{text}!{i}", str
    )
    first, second = changed["tool_calls"]
    assert changed["content"] == [{"type": "text", "text": "A"}, {"type": "image"}]
    assert first == {**CALL, "function": {"name": "f!0", "arguments": {"x": "0one", "y": ["0two", {"z": "0three"}, 4]}}}
    assert second == {"name": "g!1", "arguments": '1{"x": "four"}'}
    unnamed = message_attribution.rewritten(message, str, lambda _: str, None, str)
    assert unnamed == message
    assert message["tool_calls"][0] is CALL


@pytest.mark.parametrize(
    ("call", "renamed"),
    [
        (CALL, {**CALL, "function": {"name": "f", "arguments": {"x": "M", "y": "M"}}}),
        (FLAT, {"name": "g", "arguments": "M"}),
        ({"function": {"name": "f", "arguments": {}}}, {"function": {"name": "f", "arguments": {"M": "M"}}}),
        ({"function": {"name": "f"}}, {"function": {"name": "f", "arguments": "M"}}),
        ({"function": "none"}, {"function": "none"}),
        ("no call", "no call"),
    ],
)
def test_a_call_with_other_arguments(call: Any, renamed: Any) -> None:
    assert replaced_messages._renamed(call, "M") == renamed


MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "alpha\n  beta"},
    {
        "role": "assistant",
        "content": "gamma",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": "delta"}}}],
    },
    {"role": "tool", "content": "epsilon <|im_end|> zeta", "name": "f"},
    {"role": "assistant", "content": "eta"},
]
WORDS = {"alpha": 0, "beta": 0, "gamma": 1, "delta": 1, "epsilon": 2, "zeta": 2, "eta": 3}


@pytest.mark.parametrize("name", ["chatml", "thinking", "llama", "glm"])
@pytest.mark.parametrize("prompted", [False, True])
def test_every_word_is_its_messages(name: str, prompted: bool) -> None:
    template = ChatTemplate(tiny_tokenizer(name, marks=False), None, {})
    text = template.text(MESSAGES, prompted)
    found = attribute_messages(template, MESSAGES, text, prompted)
    assert found.unknown == ()
    assert all(a.end <= b.start for a, b in pairwise(found.pieces))
    for word, message in WORDS.items():
        if word not in text:
            continue
        at = text.rindex(word) if word == "eta" else text.index(word)
        (owner,) = {piece.message for piece in found.pieces if piece.start <= at and at + len(word) <= piece.end}
        assert owner == message
    for piece in found.pieces:
        assert "assistant\n" not in text[piece.start : piece.end]  # what the template wrote is nobody's


@pytest.mark.parametrize("prompted", [False, True])
def test_a_message_is_found_by_what_another_text_changes(prompted: bool) -> None:
    template = ChatTemplate(tiny_tokenizer("chatml", marks=False), None, {})
    text = template.text(MESSAGES[:1], prompted)
    pieces = find_by_difference(template, MESSAGES[:1], 0, text, prompted)
    assert pieces is not None
    (piece,) = pieces
    assert text[piece.start : piece.end] == "alpha\n  beta"
    refused = ChatTemplate(tiny_tokenizer("chatml", template="{{ raise_exception('no') }}"), None, {})
    assert find_by_difference(refused, MESSAGES[:1], 0, text, prompted) is None
    deaf = ChatTemplate(tiny_tokenizer("chatml", template="always the same"), None, {})
    assert find_by_difference(deaf, MESSAGES[:1], 0, "always the same", prompted) is None


SPOKEN = st.sampled_from(["a", "b'", "[{'type': 'text', 'text': 'a'}]", "x" * 60 + "a", "x" * 60 + "b"])
LISTS = st.lists(st.lists(st.builds(lambda word: {"type": "text", "text": word}, SPOKEN), max_size=2), max_size=5)


@settings(deadline=None, max_examples=200)
@given(LISTS, st.data())
def test_lists_that_are_printed_are_those_that_stand_in_the_text(lists: list[Any], data: st.DataObject) -> None:
    bits = [bit for written in map(str, lists) for bit in (written, written[:-1])]
    text = "".join(data.draw(st.lists(st.sampled_from([*bits, "[{'type'", "z"]), max_size=6)))
    messages = [{"role": "user", "content": content} for content in [*lists, "text"]]
    expected = {number for number, content in enumerate(lists) if content and str(content) in text}
    assert printed_parts(messages, text) == expected

"""The marks that tell whose each character is: which they are, what they enclose, and what is done without them."""

import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_tools.rendering import message_attribution
from chat_tools.rendering.message_attribution import MessageAttribution, attribute_messages
from chat_tools.rendering.replaced_messages import MessageSpan, find_by_difference
from chat_tools.rendering.template import ChatTemplate, Message
from chat_tools.rendering.text_marks import Marks, Place
from chat_tools.testing.tokenizer import tiny_tokenizer

PRIVATE = 0xF0000
CUTS = "{{ m.content.split('</think>')[-1] if '<a>' in m.content and m.content.startswith('word') else ' ' in m }}"


def difference(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], index: int, text: str, prompted: bool
) -> list[MessageSpan]:
    pieces = find_by_difference(template, messages, index, text, prompted)
    assert pieces is not None
    return pieces


def call(name: str = "f", **arguments: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


@settings(deadline=None)
@given(st.text([chr(PRIVATE + n) for n in range(12)], max_size=6), st.lists(st.integers(0, 2), min_size=1, max_size=3))
def test_marks_are_the_first_free_characters(text: str, calls: list[int]) -> None:
    """One for each message's words, two for each call, one that closes; none of them stands in the text."""
    needed = 1 + sum(1 + 2 * n for n in calls)
    marks = Marks("", text, [{"content": "x", "tool_calls": [call()] * n} for n in calls])
    opening = [marks.wrap(Place(number))("x")[0] for number in range(needed - 1)]
    chosen = [ord(mark) for mark in (*opening, marks.close)]
    taken = set(map(ord, text))
    first = next(b for b in count(PRIVATE, needed) if not taken & set(range(b, b + needed)))
    assert chosen == list(range(first, first + needed))
    assert all(marks.pattern.fullmatch(mark) for mark in (*opening, marks.close))
    assert [place.message for place in marks.table] == list(range(needed - 1))


bits = st.sampled_from(["a", "b b", "\n", " ", "  \n", "</think>", "<a>", "word", "\t"])


@settings(deadline=None)
@given(st.lists(bits, max_size=8).map("".join))
def test_segments_are_what_stands_between_cuts(text: str) -> None:
    """Lines, and what a template itself cuts at; without marks the text is as before."""
    marks = Marks(CUTS, text, [{"content": text}])
    place = Place(0)
    marked = marks.wrap(place)(text)
    assert marks.pattern.sub("", marked) == text
    read = marks.read(marked)
    assert read is not None
    plain, found = read
    assert plain == text
    segments = [part.strip() for part in re.split(r"\n|</think>|<a>", text)]
    assert [text[start:end] for start, end, _ in found] == [segment for segment in segments if segment]
    assert all(owner is place for _, _, owner in found)
    if found:
        assert marks.read(marked.replace(marks.close, "")) is None


def test_marks_are_read_in_pairs() -> None:
    marks = Marks("", "", [{"content": "x"}] * 3)
    first, second = (marks.wrap(Place(number))("x")[0] for number in (5, 7))
    close, places = marks.close, marks.table
    assert marks.read(f"a{first}b{close}") == ("ab", [(1, 2, places[0])])
    two = f"{first}ab{close}-{second}c{close}d"
    assert marks.read(two) == ("ab-cd", [(0, 2, places[0]), (3, 4, places[1])])
    assert marks.read("none") == ("none", [])
    for broken in [
        f"{first}a{second}b{close}",
        f"a{close}",
        f"{first}a",
        f"a{first}",
        f"{first}a{close}{close}",
    ]:
        assert marks.read(broken) is None


TURN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}BODY{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALLS = (
    "{% for c in m.tool_calls or [] %}"
    "{{ '\n(' + NAME + ':' + c.function.arguments.values() | join('|') + ')' }}{% endfor %}"
)
BODY = "{{ m.content }}" + CALLS.replace("NAME", "c.function.name")
COUNTED = "{{ m.content | length if m.role == 'user' }}"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": ""},
    {"role": "user", "content": "alpha\n  beta"},
    {"role": "assistant", "content": "gamma", "tool_calls": [call(x="delta\nepsilon"), call("g", y="zeta")]},
    {"role": "tool", "content": "eta\ntheta"},
    {"role": "user", "content": "one\ntwo"},
    {"role": "assistant", "content": "iota\nkappa"},
]


class Counting(ChatTemplate):
    """Count the renderings."""

    count = 0

    def trial(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        self.count += 1
        return super().trial(messages, add_generation_prompt)


def found(
    body: str, messages: Sequence[Message] = MESSAGES, prompted: bool = False
) -> tuple[list[tuple[str, int]], MessageAttribution, int]:
    """(what each piece holds and whose it is, all that was found, renderings)."""
    template = Counting(tiny_tokenizer("chatml", template=TURN.replace("BODY", body)), None, {})
    text = template.text(messages, prompted)
    template.count = 0
    known = attribute_messages(template, messages, text, prompted)
    return [(text[p.start : p.end], p.message) for p in known.pieces], known, template.count


USER, LATER = [("alpha", 1), ("beta", 1)], [("one", 4), ("two", 4)]
ANSWER = [("gamma", 2), ("f", 2), ("delta", 2), ("epsilon", 2), ("g", 2), ("zeta", 2)]
REST = [("eta", 3), ("theta", 3)]
LAST = [("iota", 5), ("kappa", 5)]


@pytest.mark.parametrize("prompted", [False, True])
def test_every_line_is_its_messages_by_one_rendering(prompted: bool) -> None:
    pieces, known, renderings = found(BODY, prompted=prompted)
    assert pieces == [*USER, *ANSWER, *REST, *LATER, *LAST]
    assert (list(known.unknown), list(known.without_calls), renderings) == ([], [], 1)


@pytest.mark.parametrize("prompted", [False, True])
def test_names_that_a_template_looks_at_are_not_marked(prompted: bool) -> None:
    body = "{{ m.content }}" + CALLS.replace("NAME", "c.function.name | length | string")
    pieces, known, renderings = found(body, prompted=prompted)
    assert pieces == [*USER, *(p for p in ANSWER if p[0] not in "fg"), *REST, *LATER, *LAST]
    assert (list(known.unknown), list(known.without_calls), renderings) == ([], [], 2)


@pytest.mark.parametrize("prompted", [False, True])
@pytest.mark.parametrize("named", [True, False])
def test_what_cannot_be_marked_is_found_alone(prompted: bool, named: bool) -> None:
    """The users' words are counted: each is found by another text in its place, the others by marks of their own."""
    name = "c.function.name" if named else "c.function.name | length | string"
    pieces, known, _ = found(COUNTED + "{{ m.content }}" + CALLS.replace("NAME", name), prompted=prompted)
    answer = ANSWER if named else [p for p in ANSWER if p[0] not in "fg"]
    assert pieces == [("12alpha\n  beta", 1), *answer, *REST, ("7one\ntwo", 4), *LAST]
    assert (list(known.unknown), list(known.without_calls)) == ([], [])


@pytest.mark.parametrize("prompted", [False, True])
def test_a_call_alone_is_found_by_its_name(prompted: bool) -> None:
    bare = {"role": "assistant", "content": "", "tool_calls": [call(x="")]}
    for body in (BODY, COUNTED + BODY):
        pieces, _, _ = found(body, [MESSAGES[1], bare, MESSAGES[5]], prompted)
        assert ("f", 1) in pieces
    silent = {"role": "assistant", "content": " "}
    pieces, known, _ = found(COUNTED + BODY, [silent, MESSAGES[1], MESSAGES[5]], prompted)
    assert [message for _, message in pieces] == [1, 2, 2]
    assert list(known.unknown) == []


@pytest.mark.parametrize("prompted", [False, True])
def test_calls_that_are_not_written_are_told_by_their_messages(prompted: bool) -> None:
    for body in ("{{ m.content }}", COUNTED + "{{ m.content }}"):
        _, known, _ = found(body, [*MESSAGES, *MESSAGES[2:4]], prompted)
        assert list(known.without_calls) == [2, 6]
    first = "{{ m.content }}{{ m.tool_calls[0].function.name if m.tool_calls }}"
    _, known, _ = found(first, prompted=prompted)
    assert list(known.without_calls) == [2]


@pytest.mark.parametrize("prompted", [False, True])
def test_calls_whose_arguments_alone_are_written_are_written(prompted: bool) -> None:
    pieces, known, _ = found("{{ m.content }}" + CALLS.replace("NAME + ':' + ", ""), prompted=prompted)
    assert pieces == [*USER, *(p for p in ANSWER if p[0] not in "fg"), *REST, *LATER, *LAST]
    assert list(known.without_calls) == []


def test_of_two_that_are_found_between_each_other_the_assistant_gives_way() -> None:
    """A template that counts all letters, and writes everything twice."""
    once = "{% for m in messages %}{{ m.content | length }}{{ m.content }} {% endfor %}"
    template = ChatTemplate(tiny_tokenizer("chatml", template=once + once), None, {})
    for roles, kept in (
        (("user", "assistant"), [("2hi 5hello 2hi", 0), (" 5hello", 1)]),
        (("assistant", "tool"), [("2hi ", 0), ("5hello 2hi 5hello", 1)]),
    ):
        messages = [{"role": r, "content": text} for r, text in zip(roles, ("hi", "hello"), strict=True)]
        text = template.text(messages)
        pieces = attribute_messages(template, messages, text, False).pieces
        assert [(text[p.start : p.end], p.message) for p in pieces] == kept


@pytest.mark.parametrize("prompted", [False, True])
def test_words_that_a_template_knows_by_heart_are_unknown(prompted: bool) -> None:
    """It writes nothing else in their place; what others say is found all the same."""
    heart = "{{ m.content if m.role == 'tool' or m.content in ('one\ntwo', 'alpha\n  beta') }}"
    pieces, known, _ = found(heart, [m for m in MESSAGES if m["role"] != "assistant"], prompted)
    assert pieces == [("eta", 2), ("theta", 2)]
    assert list(known.unknown) == [1, 3]


WITH_ITS_CALL = (
    "{% for m in messages %}{% if m.role != 'tool' %}{{ '\n' + m.role + ':' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '(' + c.id + c.function.arguments.x + ')' }}{% endfor %}"
    "{% elif messages[loop.index0 - 1].tool_calls %}{{ '{' + m.content + '}' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\nassistant:' }}{% endif %}"
)


@pytest.mark.parametrize("prompted", [False, True])
def test_a_turn_with_calls_is_replaced_by_one_with_calls(prompted: bool) -> None:
    """Else its result would be left out, and be taken for the turn's."""
    template = ChatTemplate(tiny_tokenizer("chatml", template=WITH_ITS_CALL), None, {})
    turn = {"role": "assistant", "content": "yo ", "tool_calls": [{"id": "7", **call(x="\ue0a1 what")}]}
    messages: list[dict[str, Any]] = [
        MESSAGES[1],
        turn,
        {"role": "tool", "content": "42"},
        {"role": "user", "content": "so"},
    ]
    text = template.text(messages, prompted)
    (piece,) = difference(template, messages, 1, text, prompted)
    assert (text[piece.start : piece.end], piece.message) == ("yo (7\ue0a1 what", 1)
    (piece,) = difference(template, messages, 3, text, prompted)
    assert (text[piece.start : piece.end], piece.message) == ("so", 3)
    (piece,) = difference(template, messages, 2, text, prompted)
    assert (text[piece.start : piece.end], piece.message) == ("42", 2)


def test_parts_are_replaced_by_parts_and_thoughts_with_the_words() -> None:
    source = (
        "{% for m in messages %}{{ '\n' + m.role + ':' }}{{ '(' + m.thinking + ')' if m.thinking }}"
        "{{ m.content[0].text }}{% endfor %}"
    )
    template = ChatTemplate(tiny_tokenizer("chatml", template=source), None, {})
    parts = [{"type": "text", "text": "so"}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": parts, "thinking": "hm"},
    ]
    text = template.text(messages)
    (piece,) = difference(template, messages, 1, text, False)
    assert text[piece.start : piece.end] == "(hm)so"
    (piece,) = difference(template, messages, 0, text, False)
    assert text[piece.start : piece.end] == "so"


@pytest.mark.parametrize("place", ["content", "tools", "options"])
def test_who_writes_such_characters_forges_no_mark(place: str) -> None:
    """Opening and closing marks in somebody's text, the tools or the options: no rendering with marks is taken."""
    forged = "\U000f0001own\U000f0002"
    tokenizer = tiny_tokenizer("chatml")
    messages = [
        {"role": "user", "content": forged if place == "content" else "hi"},
        {"role": "assistant", "content": "yes"},
    ]
    tool = {"type": "function", "function": {"name": "look", "description": forged, "parameters": {}}}
    template = ChatTemplate(
        tokenizer, [tool] if place == "tools" else None, {"x": forged} if place == "options" else {}
    )
    assert message_attribution.render_marked(template, messages, False) is None
    honest = message_attribution.render_marked(ChatTemplate(tokenizer, None, {}), [messages[1], messages[1]], False)
    assert honest is not None
    assert [piece.message for piece in honest.owners.pieces] == [0, 1]

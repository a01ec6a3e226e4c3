"""Where a region begins and ends, one decision at a time: bounds, prompts, stop tokens, and what is given up."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_tools.rendering import masks
from chat_tools.rendering.masks import Region, find_regions
from chat_tools.rendering.message_attribution import MessageAttribution
from chat_tools.rendering.replaced_messages import MessageSpan, find_together
from chat_tools.rendering.template import ChatTemplate, Message
from chat_tools.rendering.turn_delimiters import TurnDelimiters
from chat_tools.testing.tokenizer import tiny_tokenizer

USER, SAY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "one"}}}]}
MINE, OTHER = 1, 0


def template(source: str, tokens: Sequence[str] = (), stops: tuple[str, ...] | None = ("<|im_end|>",)) -> ChatTemplate:
    tokenizer = tiny_tokenizer("chatml", template=source)
    tokenizer.add_tokens(list(tokens))
    return ChatTemplate(tokenizer, None, {}, stops)


def found(
    source: str, messages: Sequence[Message], prompted: bool = False, **kind: Any
) -> tuple[list[tuple[int, str]], list[str]]:
    """(the texts of the regions with their messages, the problems)."""
    made = template(source, **kind)
    text = made.text(messages, prompted)
    regions = find_regions(made, messages, text, prompted)
    return [(r.message, text[r.start : r.end]) for r in regions.regions], regions.problems


REFUSING = template("{{ raise_exception('no') }}")


def bounds_of(letters: str, letter: str) -> list[tuple[MessageSpan, int, int, bool, bool]]:
    """By a search over characters: the runs of one owner that nobody else interrupts, and what lies around each.

    m, o and p own characters; a dot is the template's.
    """
    mine = [i for i, this in enumerate(letters) if this == letter]
    others = [i for i, this in enumerate(letters) if this not in ("." + letter)]
    groups: list[list[int]] = []
    for at in mine:
        if groups and not any(groups[-1][-1] < o < at for o in others):
            groups[-1].append(at)
        else:
            groups.append([at])
    return [
        (
            MessageSpan(group[0], group[-1] + 1, "mop".index(letter)),
            max((o + 1 for o in others if o < group[0]), default=0),
            min((o for o in others if o > group[-1]), default=len(letters)),
            group is groups[0],
            group is groups[-1],
        )
        for group in groups
    ]


@settings(deadline=None)
@given(st.text("mop.", max_size=14))
def test_bounds_are_those_of_a_search_over_characters(letters: str) -> None:
    pieces, at = [], 0
    for letter, run in groupby(letters):
        length = len(list(run))
        if letter != ".":
            pieces.append(MessageSpan(at, at + length, "mop".index(letter)))
        at += length
    got = masks._bounded(pieces, len(letters))
    assert {message: [tuple(bounds) for bounds in own] for message, own in got.items()} == {
        "mop".index(letter): bounds_of(letters, letter) for letter in "mop" if letter in letters
    }


def test_an_empty_piece_is_bounded_by_its_neighbours() -> None:
    (bounds,) = masks._bounded([MessageSpan(0, 4, OTHER), MessageSpan(4, 4, MINE), MessageSpan(4, 9, OTHER)], 12)[MINE]
    assert tuple(bounds) == (MessageSpan(4, 4, MINE), 4, 4, True, True)
    (bounds,) = masks._bounded([MessageSpan(0, 2, MINE), MessageSpan(4, 4, MINE), MessageSpan(4, 9, OTHER)], 12)[MINE]
    assert tuple(bounds) == (MessageSpan(0, 4, MINE), 0, 4, True, True)


class Counted(list[MessageSpan]):
    """Count how often the pieces are read."""

    reads = 0

    def __iter__(self) -> Iterator[MessageSpan]:
        for piece in super().__iter__():
            self.reads += 1
            yield piece


@pytest.mark.parametrize("turns", [3, 40])
def test_bounds_cost_one_look_at_each_piece(turns: int) -> None:
    """However many turns there are."""
    pieces = Counted(MessageSpan(at, at + 1, at) for at in range(turns))
    masks._bounded(pieces, turns)
    assert pieces.reads == turns


def seen() -> masks._Seen:
    return masks._Seen(True, {})


def start(
    text: str,
    delimiters: TurnDelimiters,
    lower: int,
    begin: int,
    first: bool = True,
    made: Any = None,
    messages: Sequence[Message] = (USER, SAY),
) -> int | None:
    bounds = masks._Bounds(MessageSpan(begin, len(text), MINE), lower, len(text), first, True)
    return masks._start(made, messages, 1, text, delimiters, bounds, seen())


def cut_frame(prompt: str, *cuts: int, opening: str = "") -> TurnDelimiters:
    return TurnDelimiters(prompt, "", opening, prompt_cuts=cuts or (len(prompt),))


@pytest.mark.parametrize(
    ("text", "delimiters", "lower", "begin", "expected"),
    [
        ("q A:hi", cut_frame("A:"), 1, 4, 4),
        ("q A: hi", cut_frame("A:"), 1, 5, 4),  # what stands between prompt and words is the turn's
        ("A: hi", cut_frame("A:"), 0, 3, 2),  # at the very beginning
        ("q A: A: hi", cut_frame("A:"), 1, 8, 7),  # the last one
        ("q A:A:", cut_frame("A:"), 1, 4, 4),  # the words hold one
        ("A:q A: hi", cut_frame("A:"), 3, 7, 6),
        ("q<a> hi", cut_frame("<a><b><c>", 9, 6, 3), 1, 5, 4),  # a third of the prompt is enough
        ("q<a><b> hi", cut_frame("<a><b><c>", 9, 6, 3), 1, 8, 7),  # the longest beginning
        ("q[/I] hi", cut_frame("", opening="[/I]"), 1, 6, 5),  # no header
        ("q\nA: A: hi", cut_frame("A:", opening="\nA:"), 1, 8, 7),  # the prompt, not the opening
    ],
)
def test_a_region_begins_where_the_prompt_ends(
    text: str, delimiters: TurnDelimiters, lower: int, begin: int, expected: int | None
) -> None:
    assert start(text, delimiters, lower, begin) == expected


def test_a_later_piece_and_one_that_touches_begin_with_their_first_character() -> None:
    assert start("q A: hi", cut_frame("A:"), 1, 5, first=False) == 5
    assert start("A:hi", cut_frame("A:"), 2, 2) == 2


def test_a_turn_whose_prompt_is_not_found_begins_where_the_rendering_before_it_ends() -> None:
    """The prompt of the question's delimiters is "PP"; after `before` this template writes the rest."""
    plain = "{{ 'q' if messages else '' }}{% if add_generation_prompt %}{{ 'BEGIN' }}{% endif %}"
    whole, none = cut_frame("PPPPPPPPPP"), cut_frame("")
    assert start("qBEGIN hi", whole, 1, 7, made=template(plain)) is None  # the words of nobody are marked
    spoken = "{{ messages[0].content }}{% if add_generation_prompt %}{{ 'BEGIN' }}{% endif %}"
    assert start("hiBEGIN hello", whole, 2, 8, made=template(spoken)) == 7
    assert start("hiOTHER hello", whole, 2, 8, made=template(spoken)) is None
    assert start("hiBEG hello", whole, 2, 6, made=template(spoken)) == 5
    short = cut_frame("PPPPPPPPPP", 10, 3)  # three of ten characters are too few to tell a prompt by
    assert start("hiBEGINPPP hello", short, 2, 11, made=template(spoken)) == 7
    touching = cut_frame("", opening="BEGINh")  # does not end before the first word
    assert start("hiBEGINhello", touching, 2, 7, made=template(spoken)) == 7
    silent = ({"role": "user", "content": ""}, SAY)  # nobody before it owns a character
    assert start("BEGIN hello", whole, 0, 6, made=template(spoken), messages=silent) == 5
    assert start("hiBEGIN hello", whole, 2, 8, made=REFUSING) is None
    assert start("hiBEGIN hello", none, 2, 8, made=REFUSING) == 8


def test_a_turn_that_nothing_comes_before() -> None:
    """Its prompt, if found, is left out; a header that no prompt writes cannot be told from its words."""
    assert found(PLAIN, [SAY, USER]) == ([(0, "hello<|im_end|>")], [])
    odd = "{% if messages[0].role == 'assistant' %}{{ 'FIRST ' + messages[0].content }}{% else %}ALL{% endif %}"
    regions, problems = found(odd.replace("ALL", PLAIN), [SAY])
    assert (regions, problems) == ([], ["message 0: its beginning cannot be told from the message before"])
    silent = odd.replace("ALL", "{{ messages[0].content + ' ' + messages[1].content }}")
    assert found(silent, [SAY]) == ([(0, "hello")], [])


def test_a_token_that_only_begins_alike_is_not_shared() -> None:
    source = "{{ messages[0].content }}{% if add_generation_prompt %}{{ '</r>[go on]' }}{% endif %}"
    made = template(source, tokens=["[go on]", "[go off]"])
    assert start("hi</r>[go off] hello", cut_frame("PPPPPPPPPP"), 2, 15, made=made) == 6
    assert start("hi[go off] hello", cut_frame("PPPPPPPPPP"), 2, 11, made=made) is None


def turn(
    owners: MessageAttribution, text: str = "abcdef<e>", delimiters: TurnDelimiters | None = None
) -> list[Region] | str:
    delimiters = delimiters or TurnDelimiters("", "", stops=("<e>",))
    own = masks._bounded(owners.pieces, len(text)).get(1, [])
    return masks._turn(REFUSING, [USER, SAY], 1, text, delimiters, owners, own, seen())


def test_pieces_that_touch_others_are_a_region_and_those_that_overlap_are_not() -> None:
    touching = [MessageSpan(0, 2, 0), MessageSpan(2, 4, 1), MessageSpan(4, 6, 0)]
    assert turn(MessageAttribution(touching)) == [Region(1, 2, 4, 4)]
    assert turn(MessageAttribution([MessageSpan(0, 2, 0), MessageSpan(2, 6, 1)])) == [Region(1, 2, 6, 9)]
    for overlapping in ([MessageSpan(0, 3, 0), MessageSpan(2, 4, 1)], [MessageSpan(2, 4, 1), MessageSpan(3, 5, 0)]):
        assert turn(MessageAttribution(overlapping)) == (
            "message 1: the template does not render its content apart from what follows"
        )
    assert str(turn(MessageAttribution([MessageSpan(2, 4, 1)], unknown=[1]))).startswith(
        "message 1: the template does not render"
    )
    assert turn(MessageAttribution([MessageSpan(2, 4, 1)], without_calls=[1])) == f"message 1: {masks.CALLS_LEFT_OUT}"
    assert str(turn(MessageAttribution([]))).startswith("message 1: the template does not render")
    prompt = TurnDelimiters("never", "", stops=("<e>",), prompt_cuts=(5,))
    told = turn(MessageAttribution([MessageSpan(0, 1, 0), MessageSpan(2, 4, 1)]), delimiters=prompt)
    assert told == "message 1: its beginning cannot be told from the message before"


@pytest.mark.parametrize(
    ("source", "places"),
    [
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}", [5, 11]),
        ("{% for m in messages %}<{{ m.content + '.' if m.content }}>{% endfor %}", [6, 13]),  # one by one
    ],
)
def test_messages_without_text_are_found_together(source: str, places: list[int]) -> None:
    silent = {"role": "assistant", "content": ""}
    made, messages = template(source), [USER, silent, USER, silent]
    found = find_together(made, messages, [1, 3], made.text(messages), False)
    assert found == {number: MessageSpan(at, at, number) for number, at in zip((1, 3), places, strict=True)}


def test_a_turn_without_text_is_between_those_of_others() -> None:
    around = [MessageSpan(0, 4, 0), MessageSpan(5, 8, 2)]
    assert masks._among(around, MessageSpan(4, 4, 1), 9) == (MessageSpan(4, 4, 1), 4, 5, True, True)
    assert masks._among(around, MessageSpan(8, 8, 1), 9) == (MessageSpan(8, 8, 1), 8, 9, True, True)
    assert masks._among(around, MessageSpan(0, 0, 1), 9) == (MessageSpan(0, 0, 1), 0, 0, True, True)


def test_regions_with_a_line_of_a_text_are_left_out() -> None:
    text = "one two\nthree"
    regions = [Region(1, 0, 3, 3), Region(3, 4, 7, 7), Region(5, 8, 13, 13)]
    assert masks._without(regions, [" two \n\n", "x\nthree"], text) == regions[:1]
    assert masks._without(regions, ["", " \n"], text) == regions


TURN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}BODY{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = TURN.replace("BODY", "{{ m.content }}")


@pytest.mark.parametrize("prompted", [False, True])
def test_a_turn_without_words_is_its_end(prompted: bool) -> None:
    empty = {"role": "assistant", "content": ""}
    assert found(PLAIN, [USER, empty, USER, SAY, USER], prompted) == (
        [(1, "<|im_end|>"), (3, "hello<|im_end|>")],
        [],
    )
    assert found(PLAIN, [USER, empty], prompted) == ([(1, "<|im_end|>")], [])


def test_calls_that_are_left_out_are_seen_with_a_prompt_behind() -> None:
    told = f"message 1: {masks.CALLS_LEFT_OUT}"
    assert found(PLAIN, [USER, CALLS, USER, SAY, USER], True) == ([(3, "hello<|im_end|>")], [told])


def test_regions_are_in_the_order_of_the_text() -> None:
    backwards = PLAIN.replace("in messages", "in messages | reverse")
    regions, problems = found(backwards, [USER, SAY, USER, {**SAY, "content": "bye"}])
    assert (regions, problems) == ([(3, "bye<|im_end|>"), (1, "hello<|im_end|>")], [])


MAGIC = TURN.replace("BODY", "{{ m.content if m.content in ('magic', 'no magic', 'hello', 'hi') }}")


def test_words_that_might_be_anothers_are_not_trained() -> None:
    """A template that writes these words and no others: no mark and no other text can be seen."""
    magic = {"role": "user", "content": "magic"}
    told = ["message 0: where the template writes it cannot be told"]
    only_users = MAGIC.replace("if m.content", "if m.role == 'assistant' or m.content")
    assert found(only_users, [magic, SAY]) == ([(1, "hello<|im_end|>")], told)
    spell = {"role": "assistant", "content": "no magic"}
    assert found(only_users, [magic, SAY, magic, spell])[0] == [(1, "hello<|im_end|>")]
    regions, problems = found(MAGIC, [USER, SAY])
    assert regions == []
    assert problems == [
        "message 1: the template does not render its content apart from what follows",
        "message 0: where the template writes it cannot be told",
    ]


GOES_ON = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '<r>' + m.content + '</r>' }}"
    "{% elif m.role == 'assistant' %}"
    "{{ '[go on]' if loop.index0 and messages[loop.index0 - 1].role == 'tool' else '<|im_start|>assistant\n' }}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments.x }}{% endfor %}"
    "{{ '' if m.tool_calls else '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '[go on]' if messages[-1].role == 'tool' else '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("prompted", [False, True])
def test_what_a_model_is_told_after_a_result_is_not_trained(prompted: bool) -> None:
    messages: list[Message] = [USER, CALLS, {"role": "tool", "content": "42"}, {**SAY, "content": " hello"}]
    regions, problems = found(GOES_ON, messages, prompted)
    assert problems == []
    assert regions == [(1, "fone"), (3, " hello<|im_end|>")]


def test_the_stops_that_were_given_are_known() -> None:
    for stops, known in ((("<|im_end|>",), True), ((), True), (None, False)):
        made = template(PLAIN, stops=stops)
        assert find_regions(made, [USER, SAY], made.text([USER, SAY]), False).stops_known is known


def test_calls_left_out_are_listed() -> None:
    made = template(PLAIN)
    messages: list[dict[str, Any]] = [USER, CALLS, USER, SAY]
    regions = find_regions(made, messages, made.text(messages), False)
    assert regions.problems == [f"message 1: {masks.CALLS_LEFT_OUT}"]
    assert regions.owners.without_calls == [1]


HEADLESS = (
    "{% for m in messages %}{{ m.content if m.role == 'user' else MARK + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '@@@@' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("turns", "mark", "rendered"),
    [(1, "'#'", 1), (9, "'#'", 2), (30, "'#'", 2), (9, "m.mark", 3), (30, "m.mark", 3), (9, "'@@#'", 0)],
)
def test_what_did_not_tell_a_beginning_is_not_rendered_again(
    turns: int, mark: str, rendered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for the first turn, before whose question nobody spoke, and once for each mark of the others."""
    asked: list[Any] = []
    shared = masks._shared_with_prompt

    def counted(*given: Any) -> int | None:
        asked.append(given)
        return shared(*given)

    monkeypatch.setattr(masks, "_shared_with_prompt", counted)
    messages = [{**m, "mark": "#+"[turn % 2]} for turn in range(turns) for m in (USER, SAY)]
    regions, problems = found(HEADLESS.replace("MARK", mark), messages)
    assert (len(asked), len(problems)) == (rendered, turns if rendered else 0)
    assert len(regions) + len(problems) == turns


def test_a_beginning_that_is_told_by_rendering_is_told_every_time() -> None:
    """Of the prompt history keeps less than what is looked for."""
    regions, problems = found(HEADLESS.replace("MARK", "'@#'"), [USER, SAY] * 5)
    assert (problems, regions) == ([], [(2 * n + 1, "#hello<|im_end|>") for n in range(5)])

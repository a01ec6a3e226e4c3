"""Whose each character is, and what of a turn is trained: whatever others write, however the template writes it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_tools.rendering.masks import PRINTED, Region
from chat_tools.rendering.media import Expanded
from chat_tools.rendering.render import Rendered, _span, render
from chat_tools.rendering.token_places import Offsets
from chat_tools.testing.templates import TEMPLATES
from chat_tools.testing.tokenizer import tiny_tokenizer

MARKED = {name: tiny_tokenizer(name) for name in TEMPLATES}
PLAIN = {name: tiny_tokenizer(name, marks=False) for name in TEMPLATES}
NO_TOOLS = ("gemma",)
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "see you"},
]
TOOL = {"role": "tool", "content": "42"}


def call(value: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "arguments": {"word": value}}}


def trained_text(tokenizer: Any, rendered: Rendered) -> str:
    ids = [i for i, on in zip(rendered.ids, rendered.assistant_mask, strict=True) if on]
    text: str = tokenizer.decode(ids)
    return text


def forged(name: str) -> str:
    """Everything that a template of the family writes around turns, in somebody's text."""
    tokenizer = PLAIN[name]
    prompt = render(tokenizer, TALK[:1], add_generation_prompt=True).text[-40:]
    return f"zanary {''.join(TEMPLATES[name][1])} {prompt}<think>\nzanary</think> zanary"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tokenizers", [MARKED, PLAIN])
def test_markers_in_other_peoples_texts_move_no_border(name: str, tokenizers: dict[str, Any]) -> None:
    """The same answers are trained whatever users, tools and the system write, forged turns among it."""
    answers = ["hello", "see you"]
    for text in ("plain", forged(name)):
        user = {"role": "user", "content": text}
        messages: list[dict[str, Any]] = [{"role": "system", "content": text}, user, TALK[1], user, TALK[3]]
        if name not in NO_TOOLS:
            turn = {"role": "assistant", "content": "", "tool_calls": [call("x")]}
            messages = [*messages[:3], user, turn, {"role": "tool", "content": text}, TALK[3]]
        rendered = render(tokenizers[name], messages)
        assert rendered.problems == ()
        trained = trained_text(tokenizers[name], rendered)
        assert "zanary" not in trained
        assert all(answer in trained for answer in answers)
        spans = [rendered.text[s.start : s.end] for s in rendered.spans]
        assert [answer in spans[i] for i, answer in zip((0, -1), answers, strict=True)] == [True, True]
        if text == "plain":
            plain_spans = spans
        assert spans == plain_spans


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_what_others_write_never_changes_what_is_trained(name: str, data: st.DataObject) -> None:
    """Bits of markers, prompts and answers in any order, in everybody's text but the assistant's."""
    prompt = render(PLAIN[name], TALK[:1], add_generation_prompt=True).text
    bits = [
        *TEMPLATES[name][1],
        prompt,
        prompt[-20:],
        "hello",
        "see you",
        "<think>\n",
        "</think>",
        "\n",
        " ",
        "<",
        "zanary",
    ]
    texts = st.lists(st.sampled_from(bits), max_size=6).map("".join).map(lambda text: f"zanary{text}zanary")
    spoken = [TALK[1], TALK[3]]
    conversations_ = []
    for draw in (False, True):
        said = [data.draw(texts) if draw else "plain" for _ in range(3)]
        users = [{"role": "user", "content": text} for text in said[1:]]
        system = {"role": "system", "content": said[0]}
        conversations_.append(render(PLAIN[name], [system, users[0], spoken[0], users[1], spoken[1]]))
    plain, odd = conversations_
    assert odd.problems == ()
    assert [odd.text[s.start : s.end] for s in odd.spans] == [plain.text[s.start : s.end] for s in plain.spans]
    assert "zanary" not in trained_text(PLAIN[name], odd)


RESULTS_IN_THE_TURN = """
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- if loop.index0 and messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{- '<call>' + call.function.name + ':' + call.function.arguments.word + '</call>' -}}
{%- if loop.last and loop.index0 >= 0 -%}{%- set ns = namespace(on=true) -%}
{%- for r in messages[loop.index0 + 1:] -%}{%- endfor -%}{%- endif -%}
{%- endfor -%}
{%- if m.tool_calls -%}
{%- set ns = namespace(at=loop.index, on=true) -%}
{%- for r in messages[loop.index:] -%}
{%- if r.role != 'tool' -%}{%- set ns.on = false -%}{%- endif -%}
{%- if ns.on -%}{{- '<|tool_response>' + r.content + '</result>' -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- m.content -}}
{%- if not m.tool_calls -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- elif m.role != 'tool' -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


def test_a_result_that_stands_inside_the_turn_is_not_trained() -> None:
    """As Gemma 4 writes it: call, result, the words beside the call, and the next answer in one turn."""
    tokenizer = tiny_tokenizer("chatml", template=RESULTS_IN_THE_TURN)
    tokenizer.add_tokens(["<|tool_response>"])
    turn = {"role": "assistant", "content": "I look.", "tool_calls": [call("x")]}
    result = {"role": "tool", "content": "zanary"}
    rendered = render(tokenizer, [TALK[0], turn, result, *TALK[1:]], stop_tokens=["<|im_end|>", "<|tool_response>"])
    assert rendered.problems == ()
    assert [(s.message, rendered.text[s.start : s.end]) for s in rendered.spans] == [
        (1, "<call>look:x</call><|tool_response>"),
        (1, "I look."),
        (3, "hello<|im_end|>"),
        (5, "see you<|im_end|>"),
    ]
    assert [(o.owner, o.message) for o in rendered.owners if rendered.text[o.start : o.end] == "zanary"] == [
        ("tool", 2)
    ]


@pytest.mark.parametrize("tokenizers", [MARKED, PLAIN])
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_character_has_one_owner(name: str, tokenizers: dict[str, Any]) -> None:
    messages = [{"role": "system", "content": "be kind"}, *TALK]
    rendered = render(tokenizers[name], messages)
    edges = [0, *(o.end for o in rendered.owners)]
    assert [o.start for o in rendered.owners] == edges[:-1]
    assert edges[-1] == len(rendered.text)
    for number, message in enumerate(messages):
        own = [o for o in rendered.owners if o.message == number]
        assert {o.owner for o in own} == {message["role"]}
        assert message["content"] in "".join(rendered.text[o.start : o.end] for o in own)
    assert {o.message for o in rendered.owners if o.owner == "template"} <= {None}


def test_calls_that_the_template_leaves_out_are_a_problem() -> None:
    """Else the model would be trained to say nothing where it should call."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    turn = {"role": "assistant", "content": "", "tool_calls": [call("x")]}
    rendered = render(tiny_tokenizer("chatml", template=template), [TALK[0], turn, TOOL, TALK[1]])
    assert rendered.problems == ("message 1: the template leaves out some of its tool calls",)
    assert [s.message for s in rendered.spans] == [3]
    two = {**turn, "tool_calls": [call("x"), call("y")]}
    assert "leaves out" in render(PLAIN["harmony"], [TALK[0], two, TOOL, TALK[1]]).problems[0]


@pytest.mark.parametrize("filter_", ["upper", "trim", "replace('hello', 'bye')", "truncate(3, true, '')"])
@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_a_template_that_changes_the_words_of_a_role(filter_: str, role: str) -> None:
    """Marked or not: what is trained is the assistant's, or it is a problem."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        f"{{{{ m.content | {filter_} if m.role == '{role}' else m.content }}}}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = tiny_tokenizer("chatml", template=template)
    rendered = render(
        tokenizer, [{**TALK[0], "content": "user hello"}, {"role": "tool", "content": "tool hello"}, TALK[1]]
    )
    trained = trained_text(tokenizer, rendered).lower()
    assert "user" not in trained
    assert "tool" not in trained
    if not rendered.problems:
        assert trained.removesuffix("<|im_end|>") in ("hello", "bye", "hel")
    assert filter_.startswith("truncate") or not rendered.problems


def test_private_characters_in_a_text_are_text() -> None:
    odd = "".join(map(chr, range(0xF0000, 0xF0010))) + "\ue0a1x\ue0b2"
    messages = [{"role": "user", "content": odd}, {"role": "assistant", "content": f"so {odd}"}, *TALK[2:]]
    rendered = render(PLAIN["chatml"], messages)
    assert rendered.problems == ()
    assert trained_text(PLAIN["chatml"], rendered) == f"so {odd}<|im_end|>see you<|im_end|>"


def test_earlier_turns_that_end_otherwise_end_in_the_mask() -> None:
    """gpt-oss ends earlier turns with a token that the tokenizer does not list as special."""
    tokenizer = tiny_tokenizer("harmony", marks=False, declared=False)
    assert "<|end|>" not in tokenizer.all_special_tokens
    trained = trained_text(tokenizer, render(tokenizer, TALK))
    assert trained == "<|channel|>final<|message|>hello<|end|><|channel|>final<|message|>see you<|return|>"


TURN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}BODY{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_name_that_comes_again_with_the_result_is_not_the_calls() -> None:
    body = (
        "{% if m.role == 'tool' %}{{ messages[loop.index0 - 1].tool_calls[0].function.name + ' gives ' }}{% endif %}"
        "{{ m.content }}"
        "{% for call in m.tool_calls or [] %}"
        "{{ call.function.name + '(' + call.function.arguments.word + ')' }}{% endfor %}"
    )
    tokenizer = tiny_tokenizer("chatml", template=TURN.replace("BODY", body))
    turn = {"role": "assistant", "content": "", "tool_calls": [call("x")]}
    rendered = render(tokenizer, [TALK[0], turn, TOOL, TALK[1]])
    assert rendered.problems == ()
    assert [rendered.text[s.start : s.end] for s in rendered.spans] == ["look(x)<|im_end|>", "hello<|im_end|>"]


def test_a_template_that_counts_the_letters() -> None:
    """Marks would be counted too: each message is found in another way."""
    tokenizer = tiny_tokenizer("chatml", template=TURN.replace("BODY", "{{ m.content | length }}: {{ m.content }}"))
    rendered = render(tokenizer, TALK)
    trained = trained_text(tokenizer, rendered)
    assert "hi" not in trained
    assert "bye" not in trained
    if not rendered.problems:
        assert trained == "5: hello<|im_end|>7: see you<|im_end|>"


@pytest.mark.parametrize(("given", "end"), [(None, ""), (["<|im_end|>"], "<|im_end|>")])
def test_a_known_stop_token_is_trained_even_if_the_marks_leave_it_out(given: list[str] | None, end: str) -> None:
    marked = "{% generation %}{{ m.content }}{% endgeneration %}"
    body = f"{{% if m.role == 'assistant' %}}{marked}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    tokenizer = tiny_tokenizer("chatml", template=TURN.replace("BODY", body))
    rendered = render(tokenizer, TALK, stop_tokens=given)
    assert trained_text(tokenizer, rendered) == f"hello{end}see you{end}"


@pytest.mark.parametrize(
    ("start", "end", "tokens", "straddling"),
    [
        (2, 5, (1, 2), []),
        (2, 6, (1, 2), [2]),
        (1, 5, (1, 2), [0]),
        (1, 6, (1, 2), [0, 2]),
        (6, 7, (0, 0), [2]),
        (0, 8, (0, 3), []),
        (5, 5, (0, 0), []),
    ],
)
def test_the_tokens_of_a_region_lie_wholly_in_it(
    start: int, end: int, tokens: tuple[int, int], straddling: list[int]
) -> None:
    found: list[int] = []
    span = _span(Region(4, start, end, end), Expanded("abcdefgh", ()), Offsets([0, 2, 5], [2, 5, 8]), found)
    assert (span.token_start, span.token_end, span.message) == (*tokens, 4)
    assert found == straddling


@pytest.mark.parametrize("marks", [True, False])
def test_parts_that_the_template_prints_as_a_list_are_a_problem_and_not_trained(marks: bool) -> None:
    """What Python prints of a list is no text that a model should learn, whether the template marks it or not."""
    rows = [("user", "hi"), ("assistant", "yo"), ("user", "bye"), ("assistant", "")]
    messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in rows]
    rendered = render(tiny_tokenizer("llama", marks=marks), messages)
    assert "[{'type': 'text', 'text': 'yo'}]" in rendered.text
    assert not any(rendered.assistant_mask)
    assert sorted(rendered.problems) == [f"message {number}: {PRINTED}" for number in range(4)]
    mixed: list[Any] = [messages[0], {"role": "assistant", "content": "yo"}]
    rendered = render(tiny_tokenizer("llama", marks=marks), mixed)
    assert rendered.problems == (f"message 0: {PRINTED}",)
    assert [rendered.text[span.start : span.end] for span in rendered.spans] == ["yo<|eot_id|>"]


def test_a_turn_that_is_not_proven_is_not_trained_though_it_is_marked() -> None:
    """The template drops contents in parts: what it marks is its own."""
    source = (
        "{% for m in messages %}{% set c = m.content if m.content is string else '' %}"
        "{% if m.role == 'user' %}<|im_start|>{{ c }}<|im_end|>{% else %}"
        "{% generation %}<|im_start|></think>{{ c + '.' if c }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|></think>{% endif %}"
    )
    messages = [{"role": role, "content": [{"type": "text", "text": "hi"}]} for role in ("user", "assistant")]
    rendered = render(tiny_tokenizer("chatml", template=source), messages, stop_tokens=["<|im_end|>"])
    assert not any(rendered.assistant_mask)
    assert rendered.problems


def test_a_block_that_is_the_first_token_ends_with_it() -> None:
    source = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ '<|im_start|>' + m['content'] }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "assistant", "content": "A"}, {"role": "user", "content": "more"}]
    rendered = render(tiny_tokenizer("chatml", template=source), messages)
    assert (rendered.problems, rendered.assistant_mask[:2], any(rendered.assistant_mask[1:])) == (
        (),
        [True, False],
        False,
    )


def test_an_answer_behind_a_result_whose_parts_are_printed() -> None:
    """As Mistral's: words go on behind a result without a header; what is printed is nobody's turn."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<q>{{ m.content[0].text }}</q>"
        "{% elif m.role == 'tool' %}<r>{{ m.content }}</r>{% else %}"
        "{% for c in m.tool_calls or [] %}<c>{{ c.function.name }}{% else %}{{ m.content[0].text }}{% endfor %}"
        "<|im_end|>{% endif %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    asked = {"role": "assistant", "content": [{"type": "text", "text": ""}], "tool_calls": [call]}
    parts = [{"type": "text", "text": f"forged</r>{word}"} for word in ("hi", "12", "done")]
    messages = [
        {"role": role, "content": [part]} for role, part in zip(("user", "tool", "assistant"), parts, strict=True)
    ]
    rendered = render(tiny_tokenizer("chatml", template=template), [messages[0], asked, *messages[1:]])
    assert [rendered.text[s.start : s.end] for s in rendered.spans] == ["<c>look<|im_end|>", "forged</r>done<|im_end|>"]
    assert rendered.problems == (f"message 2: {PRINTED}",)

from collections.abc import Sequence
from functools import wraps
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from chat_tools.rendering.generation_regions import block_mask
from chat_tools.rendering.render import Rendered, render
from chat_tools.rendering.template import ChatTemplate
from chat_tools.rendering.token_places import encode
from chat_tools.testing.templates import TEMPLATES
from chat_tools.testing.tokenizer import tiny_tokenizer

MARKED = {name: tiny_tokenizer(name) for name in TEMPLATES}
PLAIN = {name: tiny_tokenizer(name, marks=False) for name in TEMPLATES}
ONE_CALL = ("llama", "harmony")  # at most one a turn
NO_WORDS = ("llama", "harmony", "mistral")  # beside a call
NO_TOOLS = ("gemma",)

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "see you"},
]
words = st.text(st.characters(codec="utf-8", exclude_characters="<[{"), min_size=1, max_size=12).filter(
    lambda text: text.strip() == text
)


def call(value: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "arguments": {"word": value}}}


@st.composite
def conversations(draw: st.DrawFn, name: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": draw(words)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(words)})
        for _ in range(draw(st.integers(0, 2)) if name not in NO_TOOLS else 0):
            calls = [call(draw(words)) for _ in range(1 if name in ONE_CALL else draw(st.integers(1, 2)))]
            turn = {"role": "assistant", "content": "" if name in NO_WORDS else draw(words), "tool_calls": calls}
            messages.append({**turn, "reasoning_content": draw(words)} if name == "thinking" else turn)
            messages += [{"role": "tool", "content": draw(words)} for _ in calls]
        messages.append({"role": "assistant", "content": draw(words)})
        if name == "thinking" or draw(st.booleans()):
            messages[-1]["reasoning_content"] = draw(words)
    return messages


def oracle(tokenizer: Any, messages: list[dict[str, Any]], straddling: Sequence[int]) -> list[bool]:
    """The mask of transformers itself, by the template's marks, without the tokens that straddle a turn's border."""
    out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    mask = [bool(on) for on in out["assistant_masks"]]
    offsets = tokenizer(tokenizer.decode(out["input_ids"]), return_offsets_mapping=True, add_special_tokens=False)
    pairs = offsets["offset_mapping"]
    for i in range(1, len(mask)):  # transformers ends with the first token of a character that has several
        mask[i] = mask[i] or (mask[i - 1] and pairs[i] == pairs[i - 1])
    return [on and i not in straddling for i, on in enumerate(mask)]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_proven_mask_is_the_marked_one(name: str, data: st.DataObject) -> None:
    messages = data.draw(conversations(name))
    marked, plain = render(MARKED[name], messages), render(PLAIN[name], messages)
    assert plain.problems == marked.problems == ()
    assert plain.ids == marked.ids == PLAIN[name].apply_chat_template(messages, return_dict=True)["input_ids"]
    assert plain.assistant_mask == marked.assistant_mask == oracle(MARKED[name], messages, plain.straddling)
    assert [(s.message, s.token_start, s.token_end) for s in plain.spans] == [
        (s.message, s.token_start, s.token_end) for s in marked.spans
    ]


@pytest.mark.parametrize("tokenizers", [MARKED, PLAIN])
@pytest.mark.parametrize("name", NO_WORDS)
def test_words_that_a_template_leaves_out_are_a_problem(name: str, tokenizers: dict[str, Any]) -> None:
    turn = {"role": "assistant", "content": "look", "tool_calls": [call("x")]}
    messages: list[dict[str, Any]] = [TALK[0], turn, {"role": "tool", "content": "42"}, TALK[1]]
    rendered = render(tokenizers[name], messages)
    assert rendered.problems == ("message 1: the template leaves out text of it",)
    assert {span.message for span in rendered.spans} == {3}


@pytest.mark.parametrize("role", ["system", "user", "tool"])
@pytest.mark.parametrize(
    ("content", "body"),
    [
        ("word", "''"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "m.content[0].text"),
        ("one\ntwo", "m.content.split('\n')[0]"),
    ],
)
def test_others_text_that_a_template_leaves_out_is_a_problem(role: str, content: Any, body: str) -> None:
    kept = f"m.content if loop.index0 != 1 else {body}"
    source = f"{{% for m in messages %}}{{{{ ({kept}) ~ '<|im_end|>' }}}}{{% endfor %}}"
    tokenizer = tiny_tokenizer("chatml", template=source)
    first = {"role": "user", "content": "x"}
    rendered = render(tokenizer, [first, {"role": role, "content": content}, TALK[1]], stop_tokens=["<|im_end|>"])
    assert rendered.problems == ("message 1: the template leaves out text of it",)


def test_turns_that_no_stop_token_ends_are_listed() -> None:
    glm = tiny_tokenizer("glm", marks=False)
    assert render(glm, TALK, stop_tokens=["<|user|>"]).unfinished == (3,)
    assert render(glm, TALK[:3], stop_tokens=["<|user|>"]).unfinished == ()
    assert render(PLAIN["chatml"], TALK).unfinished == ()
    assert render(PLAIN["chatml"], TALK, stop_tokens=["<|endoftext|>"]).unfinished == ()  # the template's own ends it
    assert render(
        tiny_tokenizer("chatml", template="{% for m in messages %}{{ m.content }}{% endfor %}"), TALK
    ).unfinished


@pytest.mark.parametrize("tokenizers", [MARKED, PLAIN])
def test_the_mask_covers_words_and_end_of_turn(tokenizers: dict[str, Any]) -> None:
    rendered = render(tokenizers["chatml"], TALK)
    decode = tokenizers["chatml"].decode
    assert [decode(rendered.ids[s.token_start : s.token_end]) for s in rendered.spans] == [
        "hello<|im_end|>",
        "see you<|im_end|>",
    ]
    trained = [i for i, m in zip(rendered.ids, rendered.assistant_mask, strict=True) if m]
    assert decode(trained) == "hello<|im_end|>see you<|im_end|>"


def test_a_turn_with_words_of_other_turns() -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"}] * 3
    rendered = render(PLAIN["chatml"], messages)
    assert [rendered.text[s.start : s.end] for s in rendered.spans] == ["hello<|im_end|>"] * 3
    assert rendered.assistant_mask == render(MARKED["chatml"], messages).assistant_mask


ASSISTANT, TOOL = {"role": "assistant", "content": "yo", "reasoning_content": "hm"}, {"role": "tool", "content": "42"}
SYSTEM = {"role": "system", "content": "be kind"}


@pytest.mark.parametrize("tokenizers", [MARKED, PLAIN])
@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([ASSISTANT], "<|im_start|>assistant\n<think>\nhm\n</think>\n\nyo<|im_end|>\n"),
        ([TOOL], "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"),
        ([SYSTEM], "<|im_start|>system\nbe kind<|im_end|>\n"),
        (
            [SYSTEM, ASSISTANT],
            "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nyo<|im_end|>\n",
        ),
    ],
)
def test_templates_that_demand_a_user_message(
    tokenizers: dict[str, Any], messages: list[dict[str, Any]], text: str
) -> None:
    rendered = render(tokenizers["thinking"], messages)
    assert rendered.text == text
    assert rendered.problems == ()
    assert tokenizers["thinking"].decode(rendered.ids) == text
    trained = [i for i, m in zip(rendered.ids, rendered.assistant_mask, strict=True) if m]
    wanted = "hm\n</think>\n\nyo<|im_end|>" if ASSISTANT in messages else ""
    assert tokenizers["thinking"].decode(trained) == wanted


def trained_text(tokenizer: Any, rendered: Rendered) -> str:
    ids = [i for i, on in zip(rendered.ids, rendered.assistant_mask, strict=True) if on]
    text: str = tokenizer.decode(ids)
    return text


@pytest.mark.parametrize("tokenizers", [MARKED, PLAIN])
def test_a_token_over_the_border_of_a_turn_is_not_trained_and_no_problem(tokenizers: dict[str, Any]) -> None:
    """The prompt ends in a newline, and the turn begins with one: the tokenizer makes both one token."""
    messages = [TALK[0], {"role": "assistant", "content": "yo"}]
    rendered = render(tokenizers["thinking"], messages)
    assert rendered.problems == ()
    (token,) = rendered.straddling
    assert tokenizers["thinking"].decode(rendered.ids[token : token + 1]) == "\n\n"
    assert not rendered.assistant_mask[token]
    assert trained_text(tokenizers["thinking"], rendered) == "</think>\n\nyo<|im_end|>"


def test_a_stand_in_where_roles_alternate() -> None:
    assert render(PLAIN["gemma"], [ASSISTANT]).text == "<bos><start_of_turn>model\nyo<end_of_turn>\n"
    with pytest.raises(ValueError, match="put a user message"):
        render(PLAIN["gemma"], [SYSTEM, ASSISTANT])


def test_only_template_errors_are_caught() -> None:
    broken = tiny_tokenizer("chatml", template="{{ 'a' + 1 }}")
    with pytest.raises(TypeError):
        render(broken, [ASSISTANT])
    refusing = tiny_tokenizer("chatml", template="{{ raise_exception('never') }}")
    with pytest.raises(Exception, match="never"):
        render(refusing, [ASSISTANT])


def test_options_reach_the_template() -> None:
    template = "{{ 'on' if enable_thinking else 'off' }}{{ messages[0].content }}"
    tokenizer = tiny_tokenizer("chatml", template=template)
    assert render(tokenizer, TALK[:1], enable_thinking=True).text == "onhi"


def test_tools_may_be_functions() -> None:
    def look(word: str) -> str:
        """Look a word up."""
        return word

    tokenizer = tiny_tokenizer("chatml", template="{{ tools[0].function.name }}")
    assert render(tokenizer, TALK[:1], tools=[look]).text == "look"
    assert ChatTemplate(tokenizer, [look], {}).tools


RESULTS_WITH_THE_CALL = """
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if strict and not messages[loop.index0 - 1].tool_calls -%}{{- raise_exception('No call.') -}}{%- endif -%}
{%- if messages[loop.index0 - 1].tool_calls -%}{{- '<result>' + m.content + '</result>' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + m.role + '\n' + m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- '<call>' + call.function.arguments.word + '</call><|im_end|>\n' -}}
{%- endfor -%}
{%- if not m.tool_calls -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


@pytest.mark.parametrize("strict", [True, False])
def test_a_tool_result_is_never_trained(strict: bool) -> None:
    """The template renders a result only behind its call, or refuses it without one."""
    tokenizer = tiny_tokenizer("chatml", template=RESULTS_WITH_THE_CALL)
    turn = {"role": "assistant", "content": "see", "tool_calls": [call("x")]}
    rendered = render(tokenizer, [TALK[0], turn, TOOL, *TALK[1:]], strict=strict)
    assert rendered.problems == ()
    assert [rendered.text[s.start : s.end] for s in rendered.spans] == [
        "see<call>x</call><|im_end|>",
        "hello<|im_end|>",
        "see you<|im_end|>",
    ]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tokenizers", [PLAIN, MARKED])
def test_a_conversation_is_tokenised_once(
    name: str, tokenizers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the template marks turns, by `apply_chat_template` itself: decoding shows that the text is the same."""
    tokenizer = tokenizers[name]
    expected = render(tokenizer, TALK)  # finds the delimiters, which are remembered
    kind, calls = type(tokenizer), []
    tokenise, backend = kind.__call__, tokenizer.backend_tokenizer

    @wraps(tokenise)
    def counted(self: Any, text: str, *arguments: Any, **options: Any) -> Any:
        calls.append(text)
        return tokenise(self, text, *arguments, **options)

    class Backend:
        def __getattr__(self, name: str) -> Any:
            return getattr(backend, name)

        def encode(self, text: str, **options: Any) -> Any:
            calls.append(text)
            return backend.encode(text, **options)

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            calls.extend(texts)
            return backend.encode_batch_fast(texts, **options)

    monkeypatch.setattr(kind, "__call__", counted)
    monkeypatch.setattr(kind, "backend_tokenizer", Backend())
    render(tokenizer, TALK)  # looks at how the backend's tokens stand for text
    calls.clear()
    assert render(tokenizer, TALK) == expected
    assert calls == [tokenizer.apply_chat_template(TALK, tokenize=False)]


SIGNS = [
    {"role": "user", "content": "\U0001f600?"},
    {"role": "assistant", "content": "\u0301\U0001f600 na\u00efve \u4f60"},
    {"role": "user", "content": "ok"},
    {"role": "assistant", "content": "\U0001f600"},
]


@pytest.mark.parametrize("talk", [TALK, SIGNS, TALK[:1]])
@pytest.mark.parametrize("name", TEMPLATES)
def test_marked_blocks_give_the_mask_that_transformers_gives(name: str, talk: list[dict[str, Any]]) -> None:
    tokenizer = MARKED[name]
    asked = {"return_dict": True, "return_assistant_tokens_mask": True}
    template = ChatTemplate(tokenizer, None, {})
    text, blocks = template.text_and_blocks(talk, False)
    assert text == tokenizer.apply_chat_template(talk, tokenize=False)
    ids, offsets = encode(tokenizer, text)
    expected = tokenizer.apply_chat_template(talk, **asked)
    assert ids == expected["input_ids"]
    assert (blocks is None) == (not template.has_generation_marks)
    assert block_mask(blocks or [], offsets) == expected["assistant_masks"]


class Padding(type(PLAIN["chatml"])):  # type: ignore[misc]
    """A tokenizer whose `apply_chat_template` gives a token more than the text has."""

    def apply_chat_template(self, *arguments: Any, tokenize: bool = True, **options: Any) -> Any:
        out = super().apply_chat_template(*arguments, tokenize=tokenize, **options)
        if not tokenize:
            return out
        out["input_ids"] = [*out["input_ids"], out["input_ids"][-1]]
        return out


def test_ids_are_those_that_apply_chat_template_gives_whatever_the_text() -> None:
    """Only of transformers' own methods is it known that they tokenise what they give as text."""
    own = tiny_tokenizer("chatml", marks=False)
    padding = Padding(tokenizer_object=own.backend_tokenizer, eos_token=own.eos_token)
    padding.chat_template = own.chat_template
    assert render(own, TALK).problems == ()
    assert "differ from apply_chat_template" in render(padding, TALK).problems[0]
    cut: dict[str, Any] = {"truncation": True, "max_length": 8}
    assert "differ from apply_chat_template" in render(own, TALK, **cut).problems[0]


class Deaf:
    """A tokenizer whose `apply_chat_template` hands nothing on to the tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._tokenizer(*arguments, **options)

    def apply_chat_template(self, messages: Any, tokenizer_kwargs: Any = None, **options: Any) -> Any:
        return self._tokenizer.apply_chat_template(messages, **options)


@pytest.mark.parametrize("tokenizers", [MARKED, PLAIN])
def test_offsets_that_are_not_handed_on_are_asked_for(tokenizers: dict[str, Any]) -> None:
    found, expected = render(Deaf(tokenizers["chatml"]), TALK), render(tokenizers["chatml"], TALK)
    assert (found.ids, found.assistant_mask, found.spans) == (expected.ids, expected.assistant_mask, expected.spans)


LOUD = [{"role": "user", "content": "HI There"}, {"role": "assistant", "content": "Hello You"}]


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("changed", ["m.content", "m.content | capitalize", "m.content | upper"])
def test_a_tokenizer_that_changes_letters(marks: bool, changed: str) -> None:
    """It decodes to another text; and this template may look at the words, so that marks change what it writes."""
    tokenizer = tiny_tokenizer("chatml", marks=marks)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content", f"({changed})")
    rendered = render(tokenizer, LOUD)
    assert rendered.ids == tokenizer.apply_chat_template(LOUD, return_dict=True)["input_ids"]
    assert trained_text(tokenizer, rendered) == "hello you<|im_end|>"
    assert rendered.problems == ()


@pytest.mark.parametrize("forged", ["\U000f0001own\U000f0004", "\U000f0004", "\U000f0002a\U000f0001b", "\U0010fffdfar"])
def test_marks_that_a_user_wrote_are_the_users(forged: str) -> None:
    messages = [{"role": "user", "content": f"hi {forged} yes"}, {"role": "assistant", "content": "yes"}]
    rendered = render(tiny_tokenizer("chatml"), messages)
    owned = [(o.owner, rendered.text[o.start : o.end]) for o in rendered.owners if o.message is not None]
    assert owned == [("user", messages[0]["content"]), ("assistant", "yes<|im_end|>")]
    assert rendered.problems == ()

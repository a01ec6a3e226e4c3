"""Sampled tokens and what follows them: token in, token out, the token that stopped the model written once."""

from typing import Any

import pytest

from chat_tools.rendering.continuation import extend, text_after_turn
from chat_tools.rendering.render import render
from chat_tools.testing.templates import TEMPLATES
from chat_tools.testing.tokenizer import tiny_tokenizer

PLAIN = {name: tiny_tokenizer(name, marks=False) for name in TEMPLATES}
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "see you"},
]
TOOL = {"role": "tool", "content": "42"}


def call(value: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "arguments": {"word": value}}}


@pytest.mark.parametrize("name", ["chatml", "llama", "deepseek", "thinking", "mistral", "harmony"])
def test_extend_continues_token_by_token(name: str) -> None:
    tokenizer = PLAIN[name]
    messages = [{"role": "user", "content": "hi"}]
    rendered = render(tokenizer, messages, add_generation_prompt=True)
    for turn in range(3):
        words = "\n</think>\n\nhello" if name == "thinking" else " hello" if name == "mistral" else "hello"
        words = "<|channel|>final<|message|>hello" if name == "harmony" else words
        end = {"harmony": "<|end|>"}.get(name, tokenizer.eos_token)
        letters = (
            [i for c in words for i in tokenizer(c)["input_ids"]]
            if name != "harmony"
            else tokenizer(words)["input_ids"]
        )
        sampled = [*letters, tokenizer.convert_tokens_to_ids(end)]
        before = rendered
        rendered = rendered.generated(sampled, {"role": "assistant", "content": "hello"})
        rendered = extend(rendered, [{"role": "user", "content": f"more {turn}"}])
        assert rendered.ids[: len(before.ids) + len(sampled)] == before.ids + sampled
        messages += [{"role": "assistant", "content": "hello"}, {"role": "user", "content": f"more {turn}"}]
        new = tokenizer.decode(rendered.ids[len(before.ids) + len(sampled) :])
        assert render(tokenizer, messages, add_generation_prompt=True).text.endswith(new)
        assert sum(rendered.assistant_mask) == sum(before.assistant_mask) + len(sampled)
    if name != "thinking":  # which would have dropped the earlier thinking
        assert rendered.text == render(tokenizer, messages, add_generation_prompt=True).text


def test_a_turn_cut_off_by_length_is_closed_untrained() -> None:
    tokenizer = PLAIN["chatml"]
    prompt = render(tokenizer, TALK[:1], add_generation_prompt=True)
    longer = extend(prompt.generated(tokenizer("hel")["input_ids"]), TALK[2:3])
    assert (
        longer.text
        == render(
            tokenizer, [TALK[0], {"role": "assistant", "content": "hel"}, TALK[2]], add_generation_prompt=True
        ).text
    )
    assert tokenizer.decode([i for i, m in zip(longer.ids, longer.assistant_mask, strict=True) if m]) == "hel"


def test_tool_results_follow_a_call() -> None:
    tokenizer = PLAIN["thinking"]
    prompt = render(tokenizer, TALK[:1], add_generation_prompt=True)
    turn = {"role": "assistant", "content": "", "tool_calls": [call("x")]}
    sampled = tokenizer("\n</think>\n\n<tool_call>\n<function=look>...</function>\n</tool_call><|im_end|>")["input_ids"]
    longer = extend(prompt.generated(sampled, turn), [TOOL, TOOL])
    assert longer.text.endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n42\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


SAMPLED_STOPS = [
    # template, what was said, the token that stopped the model, who speaks next, how what the template adds begins
    ("glm", "hi", "<|user|>", "user", "\nbye"),
    ("glm", "hi", "<|observation|>", "user", "<|user|>\nbye"),
    ("glm", "hi", "", "user", "<|user|>\nbye"),
    ("glm", "CALL", "<|observation|>", "tool", "\n<tool_response>"),
    ("glm", "CALL", "", "tool", "<|observation|>\n<tool_response>"),
    ("harmony", "hi", "<|return|>", "user", "<|start|>user"),
    ("harmony", "hi", "<|end|>", "user", "<|start|>user"),
    ("harmony", "hi", "", "user", "<|end|><|start|>user"),
    ("harmony", "CALL", "<|call|>", "tool", "<|start|>tool"),
    ("chatml", "hi", "<|im_end|>", "user", "\n<|im_start|>user"),
    ("chatml", "hi", "<|endoftext|>", "user", "\n<|im_start|>user"),
    ("chatml", "CALL", "<|im_end|>", "tool", "\n<|im_start|>tool"),
    ("llama", "hi", "<|eot_id|>", "user", "<|start_header_id|>user"),
    ("mistral", " hi", "</s>", "user", "[INST] bye"),
    ("deepseek", "hi", "<｜end▁of▁sentence｜>", "user", "<｜User｜>bye"),
]


@pytest.mark.parametrize(("name", "said", "stop", "role", "expected"), SAMPLED_STOPS)
@pytest.mark.parametrize("known", [True, False])
def test_the_token_that_stopped_the_model_is_written_once(
    name: str, said: str, stop: str, role: str, expected: str, known: bool
) -> None:
    tokenizer = PLAIN[name]
    stops = [s for s in TEMPLATES[name][1] if s in expected or s == stop] if known else None
    prompt = render(tokenizer, TALK[:1], add_generation_prompt=True, stop_tokens=stops)
    turn: dict[str, Any] = {"role": "assistant", "content": said.strip()}
    if said == "CALL":
        turn = {"role": "assistant", "content": "", "tool_calls": [call("x")]}
        span = render(tokenizer, [TALK[0], turn]).spans[0]
        said = render(tokenizer, [TALK[0], turn]).text[span.start : span.end].removesuffix(stop)
    sampled = tokenizer(said + stop)["input_ids"]
    longer = extend(prompt.generated(sampled, turn), [{"role": role, "content": "bye"}])
    added = longer.text.removeprefix(prompt.text + said + stop)
    assert len(added) < len(longer.text)
    assert added.startswith(expected)
    assert text_after_turn(tokenizer, [{"role": role, "content": "bye"}], stop, stop_tokens=stops) == added
    assert longer.ids[: len(prompt.ids) + len(sampled)] == prompt.ids + sampled
    assert longer.assistant_mask == [False] * len(prompt.ids) + [True] * len(sampled) + [False] * (
        len(longer.ids) - len(prompt.ids) - len(sampled)
    )


def test_extend_without_a_prompt_or_render_is_refused() -> None:
    rendered = render(PLAIN["chatml"], TALK)
    with pytest.raises(ValueError, match="add_generation_prompt=True"):
        rendered.generated([1])


RESULTS_BEFORE_WORDS = """
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- if not loop.index0 or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
{%- for c in m.tool_calls or [] -%}{{- '<call>' + c.function.name + '<|tool_response>' -}}{%- endfor -%}
{%- if m.tool_calls and loop.nextitem is defined and loop.nextitem.role == 'tool' -%}
{{- loop.nextitem.content + '</result>' -}}
{%- endif -%}
{{- m.content -}}
{%- if m.content or not m.tool_calls -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- elif m.role != 'tool' -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


@pytest.mark.parametrize("words", ["", "I look."])
def test_a_result_is_not_lost_where_words_stand_beside_the_call(words: str) -> None:
    """Gemma 4's template writes call, result, words; what was sampled ends with the call, and the result follows."""
    tokenizer = tiny_tokenizer("chatml", template=RESULTS_BEFORE_WORDS)
    tokenizer.add_tokens(["<|tool_response>"])
    stops = ["<|im_end|>", "<|tool_response>"]
    prompt = render(tokenizer, TALK[:1], add_generation_prompt=True, stop_tokens=stops)
    sampled = tokenizer(f"{words}<call>look<|tool_response>")["input_ids"]
    turn = {"role": "assistant", "content": words, "tool_calls": [call("x")]}
    longer = extend(prompt.generated(sampled, turn), [TOOL])
    assert longer.text == f"{prompt.text}{words}<call>look<|tool_response>42</result>"
    assert text_after_turn(tokenizer, [TOOL], "<|tool_response>", stop_tokens=stops) == "42</result>"
    assert longer.messages[1] == turn
    (owner,) = [o for o in longer.owners if o.owner == "tool"]
    assert longer.text[owner.start : owner.end] == "42"


def test_new_messages_that_are_not_written_are_refused() -> None:
    talk = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    asking = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    deaf = f"{{% for m in messages %}}{{% if m.role != 'tool' %}}{talk}{{% endif %}}{{% endfor %}}{asking}"
    tokenizer = tiny_tokenizer("chatml", template=deaf)
    turn = render(tokenizer, TALK[:2])
    with pytest.raises(ValueError, match="leaves out message 2"):
        extend(turn, [TOOL], add_generation_prompt=False)
    assert extend(turn, [{"role": "tool", "content": " "}], add_generation_prompt=False).text == turn.text
    early = "{{ '(' + loop.nextitem.content + ')' if loop.nextitem is defined and loop.nextitem.role == 'tool' }}"
    before = tiny_tokenizer("chatml", template=deaf.replace(talk, early + talk))
    with pytest.raises(ValueError, match="message 2, or writes it before"):
        extend(render(before, TALK[:2]), [TOOL], add_generation_prompt=False)
    twice = tiny_tokenizer("chatml", template=deaf.replace(talk, early + talk).replace(" if m.role != 'tool'", " if m"))
    with pytest.raises(ValueError, match="some of the new messages before the end"):
        extend(render(twice, TALK[:2]), [TOOL], add_generation_prompt=False)


def test_what_follows_a_turn_has_the_names_and_ids_of_its_calls() -> None:
    """Templates look both up in the call that a result answers."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
        "{% if m.role == 'tool' %}{% for c in messages[loop.index0 - 1].tool_calls %}"
        "{{ c.function.name + '/' + c.id if c.id == m.tool_call_id else raise_exception('no call') }}{% endfor %}"
        "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ how + tools[0].type }}{% endif %}"
    )
    tokenizer = tiny_tokenizer("chatml", template=template)
    result = {**TOOL, "name": "look", "tool_call_id": "7"}
    text = text_after_turn(tokenizer, [result], "<|im_end|>", [{"type": "function"}], how="so")
    assert text.startswith("\n<|im_start|>tool\n42look/7<|im_end|>\nsofunction")
    with pytest.raises(TypeError):
        text_after_turn(tiny_tokenizer("chatml", template="{{ 'a' + 1 }}"), [result])


@pytest.mark.parametrize("as_text", [True, False])
def test_arguments_of_the_kind_that_the_template_takes(as_text: bool) -> None:
    arguments = "c.function.arguments" if as_text else "c.function.arguments | items | list | length | string"
    body = f"{{% for c in m.tool_calls or [] %}}{{{{ c.function.name + {arguments} }}}}{{% endfor %}}"
    talk = "{{ '<|im_start|>' + m.role + '\n' + m.content }}" + body + "{{ '<|im_end|>\n' }}"
    tokenizer = tiny_tokenizer("chatml", template=f"{{% for m in messages %}}{talk}{{% endfor %}}")
    assert text_after_turn(tokenizer, [TOOL]) == "<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n"
    assert text_after_turn(tokenizer, TALK[:1], "<|im_end|>") == "\n<|im_start|>user\nhi<|im_end|>\n"

"""Trial renderings: the text is the template's, the refusals are the sandbox's, other people's environment stays."""

from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import _compile_jinja_template

from chat_tools.rendering import template as template_module
from chat_tools.rendering.cached_template import cached_source
from chat_tools.rendering.template import ChatTemplate
from chat_tools.testing.tokenizer import tiny_tokenizer

NAMES = ["content", "role", "items", "keys", "get", "pop", "update", "clear", "upper", "format", "format_map", "nope"]
NAMES += ["__class__", "_x", "values", "append", "index", "count", "first", "last", "length", "nextitem", "cycle"]
OBJECTS = ["m", "m.content", "ns", "loop", "messages", "ns.seen", "m.data", "loop.nextitem", "ns.up", "3", "none"]
TEMPLATE = """{% set ns = namespace(seen=[1], content='c', up='a{}'.upper, role=none, items={'pop': 1}) %}
{%- for m in messages %}{{ FIRST }}|{{ SECOND is defined }}|{% if ns.content %}{{ m.content.strip() }}{% endif %}
{%- set ns.content = m.content %}{% endfor %}"""
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": " a {0.__class__} ", "data": {"pop": "own", "content": 2, "items": [1]}},
    {"role": "assistant", "content": "b"},
]
expressions = st.builds("{}.{}".format, st.sampled_from(OBJECTS[:-2]), st.sampled_from(NAMES))
expressions |= st.builds("({}){}".format, expressions, st.sampled_from(["()", "('x')", ".content", "|string"]))
ERRORS: tuple[type[Exception], ...] = (jinja2.TemplateError, TypeError, LookupError, AttributeError, ValueError)


def outcome(render: Any) -> str:
    """What comes out: a text, or which error."""
    try:
        return str(render(MESSAGES)).partition(" at 0x")[0]
    except ERRORS as error:
        return f"{type(error).__name__}: {error}".partition(" at 0x")[0]


@settings(deadline=None, max_examples=150)
@given(expressions, expressions)
def test_whatever_a_template_asks_for_the_answer_is_the_sandboxs(first: str, second: str) -> None:
    body = TEMPLATE.replace("FIRST", first).replace("SECOND", second)
    template = ChatTemplate(tiny_tokenizer("chatml", template=body), None, {})
    assert outcome(template.trial) == outcome(template.text)


@pytest.mark.parametrize("source", ["a", "\na", "  {% if true %}\n b\n{% endif %}", "{# c #}\n\n{{ 1 }}\n", "{{- 1 }}"])
def test_what_stands_before_the_source_writes_nothing(source: str) -> None:
    template = ChatTemplate(tiny_tokenizer("chatml", template=source), None, {})
    assert template.trial(MESSAGES) == template.text(MESSAGES)


def test_the_environment_that_others_use_stays_as_it_is() -> None:
    source = "{{ messages[0].content }} {# of others #}"
    changed = cached_source(source)
    assert changed is not None
    assert changed != source
    assert cached_source(source) is changed
    assert "getattr" not in vars(_compile_jinja_template(source).environment)
    assert "getattr" in vars(_compile_jinja_template(changed).environment)


@pytest.mark.parametrize(
    "body", ["{{ messages.append(1) }}", "{{ messages[0].update(a=1) }}", "{{ ''.__class__.mro() }}"]
)
def test_what_the_sandbox_forbids_stays_forbidden(body: str) -> None:
    template = ChatTemplate(tiny_tokenizer("chatml", template=body), None, {})
    with pytest.raises(jinja2.exceptions.SecurityError):
        template.trial(MESSAGES)


def test_options_that_choose_another_template_are_not_overruled() -> None:
    template = ChatTemplate(tiny_tokenizer("chatml"), None, {"chat_template": "other"})
    assert template.trial(MESSAGES) == "other"


@pytest.mark.parametrize(
    "call",
    [
        "say('a', b=m.content)",
        "say(m.content)",
        "say()",
        "say('a', 'b', 'c')",
        "say('a', d=1)",
        "m.content.split('b')",
        "m.get",
    ],
)
def test_macros_and_methods_are_called_as_the_sandbox_calls_them(call: str) -> None:
    macro = "{% macro say(a, b='x') %}{{ a }}{{ b }}{{ caller() if caller }}{{ varargs }}{% endmacro %}"
    body = macro + "{% for m in messages %}{{ CALL }}{% call say(m.content) %}in{% endcall %}{% endfor %}"
    template = ChatTemplate(tiny_tokenizer("chatml", template=body.replace("CALL", call)), None, {})
    assert outcome(template.trial) == outcome(template.text)


def test_a_text_is_proven_once_for_a_shape_and_asked_for_where_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ChatTemplate(tiny_tokenizer("chatml", marks=False), None, {})
    expected = chat.text(MESSAGES)
    asked: list[Any] = []
    apply = ChatTemplate.apply

    def counted(self: ChatTemplate, messages: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(messages)
        return apply(self, messages, *arguments, **options)

    monkeypatch.setattr(ChatTemplate, "apply", counted)
    assert [chat.text_and_blocks(MESSAGES, False) for _ in range(3)] == [(expected, None)] * 3
    assert len(asked) == 1
    monkeypatch.setattr(template_module, "rendered_plain", lambda *_: ("other", None))
    named: list[dict[str, Any]] = [{**message, "name": "x"} for message in MESSAGES]  # a shape that is not proven yet
    assert chat.text_and_blocks(named, False) == (chat.text(named), None)
    assert chat.text_and_blocks(MESSAGES, False) == (expected, None)

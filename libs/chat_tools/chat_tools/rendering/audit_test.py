import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from chat_tools.rendering.audit import TemplateReport, audit_template
from chat_tools.rendering.continuation import extend
from chat_tools.rendering.render import Rendered
from chat_tools.rendering.template import Message
from chat_tools.testing.templates import TEMPLATES
from chat_tools.testing.tokenizer import tiny_tokenizer


def causes(report: TemplateReport) -> list[str]:
    return [d.cause for d in report.divergences]


def test_a_template_that_preserves_prefixes() -> None:
    report = audit_template(tiny_tokenizer("deepseek"))
    assert report.prefix_preserving
    assert report.mask_safe


def test_a_plain_template() -> None:
    report = audit_template(tiny_tokenizer("chatml"))
    assert causes(report) == ["joined tokens"]  # a turn that begins with a newline, after a prompt that ends with one
    assert report.generation_prompt == "<|im_start|>assistant\n"
    assert (report.end_of_turn, report.separator) == ("<|im_end|>", "\n")
    assert report.format == "hermes"
    assert any("reasoning_content is not rendered" in note for note in report.notes)


def test_thinking_that_is_dropped_is_found() -> None:
    report = audit_template(tiny_tokenizer("thinking"))
    assert not report.prefix_preserving
    assert "dropped thinking" in causes(report)
    assert "merged tool results" in causes(report)
    assert report.demands_user
    dropped = next(d for d in report.divergences if d.cause == "dropped thinking")
    assert dropped.expected == "<think>"
    assert dropped.context.endswith("assistant\n")


@pytest.mark.parametrize("name", TEMPLATES)
def test_marks_that_agree_with_the_proof_are_safe(name: str) -> None:
    for marks in (True, False):
        report = audit_template(tiny_tokenizer(name, marks))
        assert report.mask_problems == ()
        left_out = [note for note in report.notes if "leaves out some of its tool calls" in note]
        assert bool(left_out) == (name == "harmony")  # which writes one call at most
        assert report.generation_marks == marks


def test_marks_that_leave_out_the_end_of_turn_are_not_safe() -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    report = audit_template(tiny_tokenizer("chatml", template=template))
    assert not report.mask_safe
    assert "the template marks 'A colour.', the model would write 'A colour.<|im_end|>'" in report.mask_problems[0]


def test_a_template_that_trims_is_found() -> None:
    report = audit_template(tiny_tokenizer("llama"))
    assert "trailing newline" in causes(report)


def test_a_report_is_text_and_data() -> None:
    report = audit_template(tiny_tokenizer("thinking"))
    assert "prefix-preserving       NO" in str(report)
    json.dumps(report.to_dict())


def test_marks_that_hold_more_than_the_model_writes_are_noted_and_not_trained() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}{% endgeneration %}"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    report = audit_template(tiny_tokenizer("chatml", template=template))
    assert report.mask_safe
    assert any("marks hold '<|im_start|>assistant\\n', '\\n' too" in note for note in report.notes)


def test_a_template_that_joins_text_to_arguments_gets_an_answer() -> None:
    """DeepSeek-V3 takes the arguments of a call as JSON text, and raises Python's own error at anything else."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name + '(' + call.function.arguments + ')' }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    report = audit_template(tiny_tokenizer("chatml", template=template))
    assert "tool result: the template takes arguments as JSON text" in report.notes
    assert report.mask_safe


def test_a_template_that_needs_tools_is_tried_with_one() -> None:
    source = (
        "{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
        "{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}{{ 'assistant: ' if add_generation_prompt }}"
    )
    report = audit_template(tiny_tokenizer("chatml", template=source), stop_tokens=["<|im_end|>"])
    assert report.mask_safe
    assert "the template needs tools: it was tried with one" in report.notes


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_sampled_turn_that_is_extended_is_the_longer_rendering(name: str) -> None:
    assert audit_template(tiny_tokenizer(name, marks=False)).extension_problems == ()


def test_an_end_without_a_stop_token_of_the_model_is_noted() -> None:
    report = audit_template(tiny_tokenizer("chatml"), stop_tokens=["<|endoftext|>"])
    assert "the template ends turns with '<|im_end|>', which holds no stop token of the model" in report.notes


def test_an_extension_that_differs_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(rendered: Rendered, messages: Sequence[Message]) -> Rendered:
        longer = extend(rendered, messages)
        return replace(longer, text=longer.text.replace("<|im_end|>", "<|im_end|><|im_end|>"))

    monkeypatch.setattr("chat_tools.rendering.audit.extend", twice)
    problems = audit_template(tiny_tokenizer("chatml")).extension_problems
    assert problems[0].startswith("plain turns: after message 1: extend writes '<|im_end|>")

import json

import pytest

from chat_tools.rendering.audit import audit_template
from chat_tools.testing.templates import TEMPLATES
from chat_tools.testing.tokenizer import tiny_tokenizer


def causes(report):
    return [d.cause for d in report.divergences]


def test_a_template_that_preserves_prefixes():
    report = audit_template(tiny_tokenizer("deepseek"))
    assert report.prefix_preserving
    assert report.mask_safe


def test_a_plain_template():
    report = audit_template(tiny_tokenizer("chatml"))
    assert causes(report) == ["joined tokens"]  # a turn that begins with a newline, after a prompt that ends with one
    assert report.generation_prompt == "<|im_start|>assistant\n"
    assert (report.end_of_turn, report.separator) == ("<|im_end|>", "\n")
    assert report.format == "hermes"
    assert any("reasoning_content is not rendered" in note for note in report.notes)


def test_thinking_that_is_dropped_is_found():
    report = audit_template(tiny_tokenizer("thinking"))
    assert not report.prefix_preserving
    assert "dropped thinking" in causes(report)
    assert "merged tool results" in causes(report)
    assert report.demands_user
    dropped = next(d for d in report.divergences if d.cause == "dropped thinking")
    assert dropped.expected == "<think>"
    assert dropped.context.endswith("assistant\n")


@pytest.mark.parametrize("name", TEMPLATES)
def test_marks_that_agree_with_the_proof_are_safe(name):
    """Only where the tokenizer joins the prompt's last newline to the turn's first one, the mask is not safe."""
    for marks in (True, False):
        report = audit_template(tiny_tokenizer(name, marks))
        joined = [p for p in report.mask_problems if "joins" not in p and "would write" not in p]
        assert not joined
        assert report.generation_marks == marks


def test_marks_that_leave_out_the_end_of_turn_are_not_safe():
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    report = audit_template(tiny_tokenizer("chatml", template=template))
    assert not report.mask_safe
    assert "the template marks 'A colour.', the model would write 'A colour.<|im_end|>'" in report.mask_problems[0]


def test_a_template_that_trims_is_found():
    report = audit_template(tiny_tokenizer("llama"))
    assert "trailing newline" in causes(report)


def test_a_report_is_text_and_data():
    report = audit_template(tiny_tokenizer("thinking"))
    assert "prefix-preserving       NO" in str(report)
    json.dumps(report.to_dict())

from typing import Any

import pytest

from chat_tools.parsing.formats import FORMATS, formats
from chat_tools.parsing.parser import parse
from chat_tools.rendering import format_detection as detection
from chat_tools.rendering.format_detection import detect_format
from chat_tools.testing.templates import TEMPLATES
from chat_tools.testing.tokenizer import tiny_tokenizer

FAMILY = {
    "chatml": "hermes",
    "thinking": "qwen3_xml",
    "llama": "llama3_json",
    "mistral": "mistral",
    "gemma": "gemma",
    "glm": "glm-4.5",
    "deepseek": "deepseek_v3.1",
    "harmony": "harmony",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("marks", [True, False])
def test_each_family_is_known_by_the_call_it_writes(name: str, marks: bool) -> None:
    assert detect_format(tiny_tokenizer(name, marks)) == FAMILY[name]


def template_of(fmt: Any, end: str, note: str = "") -> str:
    """A template whose calls are a format's own, with the message's name and values in them, and `end` behind a turn.

    The notes of a template do not stand in what it renders.
    """
    written = fmt.write([("NAME", {"word": "VALUE", "times": 77})])
    for word, path in (("NAME", "name"), ("VALUE", "arguments.word"), ("77", "arguments.times")):
        assert written.count(word) == 1 + (
            word == "NAME" and fmt.recipients is not None
        )  # a message's header has it too
        written = written.replace(word, f"{{{{ call.function.{path} }}}}")
    calls = f"{{% for call in m.tool_calls %}}{written}{{% endfor %}}"
    turn = f"{{% if m.tool_calls %}}{calls}{{% else %}}{{{{ m.content }}}}{{% endif %}}{end}\n"
    turns = f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{turn}{{% endfor %}}"
    return f"{turns}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}{{# {note} #}}"


@pytest.mark.parametrize(("name", "end"), [(name, end) for name in formats() for end in ("", *FORMATS[name].ends)])
def test_each_format_is_known_by_the_call_it_writes(name: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing behind it, and with each token that ends its turns; no marker in the template's text helps here."""
    monkeypatch.setattr(detection, "_SIGNS", ())
    monkeypatch.setattr(detection, "_own_signs", list)
    template = template_of(FORMATS[name], end, FORMATS[name].sign)
    assert detect_format(tiny_tokenizer("chatml", template=template)) == name


SAME_TEXT = {"ernie45": "hermes"}
"""Formats that write the same as another one, and are taken for it where their sign does not stand in the template."""


@pytest.mark.parametrize("name", [name for name in formats() if FORMATS[name].sign])
def test_without_its_sign_a_format_is_one_that_reads_the_same(name: str) -> None:
    fmt = FORMATS[name]
    found = detect_format(tiny_tokenizer("chatml", template=template_of(fmt, "")))
    assert found == SAME_TEXT.get(name, name)
    one, other = parse(fmt.example, name), parse(fmt.example, found)
    assert one.tool_calls == other.tool_calls
    assert one.segments == other.segments


def refusing(note: str) -> Any:
    """A template that refuses a call, with a note in its text."""
    return tiny_tokenizer("chatml", template="{{ raise_exception('no') }}{# " + note + " #}")


UNMARKED = {"llama3_json": "<|python_tag|>", "pythonic": "<|python_start|>", "xlam": ""}
"""Formats whose usual call holds no marker, and the marker by which else a template is known; xlam has none its own."""


@pytest.mark.parametrize("name", formats())
def test_a_template_that_refuses_calls_is_known_by_its_text(name: str) -> None:
    """By the example of a call in it; where that holds no marker, by the marker that calls may have."""
    fmt = FORMATS[name]
    if name not in UNMARKED:
        assert detect_format(refusing(f"{fmt.example} {fmt.sign}")) == name
        return
    with pytest.raises(ValueError, match="choose one of"):
        detect_format(refusing(fmt.example))
    if UNMARKED[name]:
        assert detect_format(refusing(UNMARKED[name])) == name


def test_of_two_markers_the_more_telling_one_counts() -> None:
    assert detect_format(refusing("tools are called with <function= in <tool_call>")) == "qwen3_xml"


def test_no_format() -> None:
    with pytest.raises(ValueError, match="choose one of"):
        detect_format(tiny_tokenizer("chatml", template="{{ messages[0].content }}"))

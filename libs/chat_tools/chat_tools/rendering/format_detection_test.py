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
    "gemma": "functiongemma",
    "glm": "glm-4.5",
    "deepseek": "deepseek_v3.1",
    "harmony": "harmony",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("marks", [True, False])
def test_each_family_is_known_by_the_call_it_writes(name: str, marks: bool) -> None:
    assert detect_format(tiny_tokenizer(name, marks)) == FAMILY[name]


def _with_fields(fmt: Any, numbers: range) -> str:
    """Calls of a format, with the message's names and values in them."""
    written = fmt.write([(f"NAME{i}", {"word": f"VALUE{i}", "times": 77 + i}) for i in numbers])
    for i in numbers:
        for word, path in ((f"NAME{i}", "name"), (f"VALUE{i}", "arguments.word"), (str(77 + i), "arguments.times")):
            # A message's header has the name too.
            assert written.count(word) == 1 + ("NAME" in word and fmt.recipients is not None)
            written = written.replace(word, f"{{{{ m.tool_calls[{i}].function.{path} }}}}")
    return str(written)


def template_of(fmt: Any, end: str, note: str = "") -> str:
    """A template whose calls are a format's own, with the message's name and values in them, and `end` behind a turn.

    The notes of a template do not stand in what it renders.
    """
    one, two = (_with_fields(fmt, range(count)) for count in (1, 2))
    calls = f"{{% if m.tool_calls | length == 1 %}}{one}{{% else %}}{two}{{% endif %}}"
    turn = f"{{% if m.tool_calls %}}{calls}{{% else %}}{{{{ m.content }}}}{{% endif %}}{end}\n"
    turns = f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{turn}{{% endfor %}}"
    return f"{turns}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}{{# {note} #}}"


@pytest.mark.parametrize(("name", "end"), [(name, end) for name in formats() for end in ("", *FORMATS[name].ends)])
def test_each_format_is_known_by_the_call_it_writes(name: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing behind it, and with each token that ends its turns; no marker in the template's text helps here."""
    monkeypatch.setattr(detection, "_by_markers", lambda *_, **__: None)
    template = template_of(FORMATS[name], end, FORMATS[name].sign)
    expected = name if end else SAME_WITHOUT_END.get(name, name)
    assert detect_format(tiny_tokenizer("chatml", template=template)) == expected


SAME_WITHOUT_END = {"ling3": "glm-4.5", "poolside_v1": "glm-4.5", "spark2.5": "glm-4.7", "granite4": "hermes"}
"""Formats that write as another does: the token that ends a turn tells them apart."""
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


SAME_MARKERS = {
    **SAME_WITHOUT_END, "glm-4.7": "glm-4.5", "spark2.5": "glm-4.5", "lfm2_json": "lfm2", "mimo": "qwen3_xml",
    "minimax_m1": "hunyuan",
}  # fmt: skip
"""Formats whose markers are those of another one, which is the answer where a template writes no call."""
UNMARKED = {
    "llama3_json": "<|python_tag|>",
    "pythonic": "<|python_start|>",
    "functionary_v3.2": ">>>all",
    "xlam": "",
}
"""Formats whose usual call holds no marker, and the marker by which else a template is known; xlam has none its own."""


@pytest.mark.parametrize("name", formats())
def test_a_template_that_refuses_calls_is_known_by_its_text(name: str) -> None:
    """By the example of a call in it; where that holds no marker, by the marker that calls may have."""
    fmt = FORMATS[name]
    if name not in UNMARKED:
        assert detect_format(refusing(f"{fmt.example} {fmt.sign}")) == SAME_MARKERS.get(name, name)
        return
    with pytest.raises(ValueError, match="choose one of"):
        detect_format(refusing(fmt.example))
    if UNMARKED[name]:
        assert detect_format(refusing(UNMARKED[name])) == name


def test_of_two_markers_the_more_telling_one_counts() -> None:
    assert detect_format(refusing("tools are called with <function= in <tool_call>")) == "qwen3_xml"


ACCORDING_TO_TEXT = {
    # IBM Granite 3.3: the answer's own markers are another format's sign.
    "granite": "{% if tools %}Write <|tool_call|> and a list.{% endif %}{% if thinking %}<response>{% endif %}",
    # Command R+: a fence of JSON is no DeepSeek.
    "": "Write ```json and a list of actions.",
}


@pytest.mark.parametrize("name", ACCORDING_TO_TEXT)
def test_a_template_that_writes_no_call_needs_all_markers_of_a_format(name: str) -> None:
    body = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}[assistant]"
    )
    tokenizer = tiny_tokenizer("chatml", template=f"{ACCORDING_TO_TEXT[name]}{body}{{% endif %}}")
    if name:
        assert detect_format(tokenizer) == name
    else:
        with pytest.raises(ValueError, match="choose one of"):
            detect_format(tokenizer)


CALLS_ONLY = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}WRITTEN{% endfor %}</s>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def writing(call: str) -> Any:
    """A template that writes calls so, one after another."""
    return tiny_tokenizer("chatml", template=CALLS_ONLY.replace("WRITTEN", call))


def test_a_call_that_no_format_reads_is_no_other_format() -> None:
    """Functionary's JSON in a tag of Qwen's is read; a call in tags of nobody's is an error that shows it."""
    json_in_tag = "<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function>"
    assert detect_format(writing(json_in_tag)) == "functionary"
    unread = "<tool_call>{{ c.function.name }}: {{ c.function.arguments | tojson }}</tool_call>"
    with pytest.raises(ValueError, match=r"writes a call that no known format reads: .*look_up: "):
        detect_format(writing(unread))


def test_a_second_call_that_would_be_lost_is_an_error() -> None:
    """MiniMax M1 writes objects in one pair of markers; Hunyuan's reader takes one list there, LongCat's one object."""
    lines = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}<tool_calls>\n"
        "{% for c in m.tool_calls %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n{% endfor %}</tool_calls>'
        "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert detect_format(tiny_tokenizer("chatml", template=lines)) == "minimax_m1"
    with pytest.raises(ValueError, match="writes a call that no known format reads"):
        detect_format(tiny_tokenizer("chatml", template=lines.replace("tool_calls>", "longcat_tool_call>")))


def test_line_ends_of_a_value_tell_formats_apart() -> None:
    parameters = "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>NL{{ v }}NL</parameter>{% endfor %}"
    call = "<tool_call><function={{ c.function.name }}>" + parameters + "</function></tool_call>"
    assert detect_format(writing(call.replace("NL", ""))) == "mimo"
    assert detect_format(writing(call.replace("NL", "\n"))) == "qwen3_xml"


def test_tags_with_a_suffix_of_the_checkpoint() -> None:
    pairs = "".join(f"<arg_{kind}:v>{{{{ {name} }}}}</arg_{kind}:v>" for kind, name in (("key", "k"), ("value", "v")))
    arguments = f"{{% for k, v in c.function.arguments.items() %}}{pairs}{{% endfor %}}"
    call = f"<tool_calls:v><tool_call:v>{{{{ c.function.name }}}}<tool_sep:v>{arguments}</tool_call:v></tool_calls:v>"
    found = detect_format(writing(call))
    assert found == "hy_v3:v"
    (read,) = parse(FORMATS["hy_v3"].example.replace(">", ":v>"), found).tool_calls
    assert read.arguments_dict() == {"city": "Paris", "days": "3"}


def test_no_format() -> None:
    with pytest.raises(ValueError, match="choose one of"):
        detect_format(tiny_tokenizer("chatml", template="{{ messages[0].content }}"))


def response_template(opening: str, closing: str) -> dict[str, Any]:
    """What transformers reads a turn by: an object of JSON between markers is a call."""
    call = {"open": opening, "close": closing, "content": "json", "repeats": True}
    call["transform"] = {"type": "function", "function": "{content}"}
    return {
        "defaults": {"role": "assistant"},
        "fields": {"content": {"close": "<|im_end|>", "content": "text"}, "tool_calls": call},
        "start_anchor": "<|im_start|>assistant\n",
    }


def test_a_response_template_reads_what_the_format_writes_or_the_answer_is_an_error() -> None:
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.response_template = response_template("<tool_call>", "</tool_call>")
    assert detect_format(tokenizer) == "hermes"
    tokenizer.response_template = response_template("<call>", "</call>")
    with pytest.raises(ValueError, match="response_template does not read the calls of hermes, in which the chat"):
        detect_format(tokenizer)


def test_a_response_template_decides_where_the_chat_template_writes_no_call() -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    plain += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer = tiny_tokenizer("chatml", template=plain)
    tokenizer.response_template = response_template("<longcat_tool_call>", "</longcat_tool_call>")
    assert detect_format(tokenizer) == "longcat"
    tokenizer.response_template = response_template("<call>", "</call>")
    with pytest.raises(ValueError, match="response_template does not read any format's calls"):
        detect_format(tokenizer)

from typing import Any

import pytest

from chat_tools import find_format, parse
from chat_tools.known_formats.servers import NAMES, OTHER_FORMATS, REFUSED

ALL = [(server, name) for server, names in NAMES.items() for name in names]


@pytest.mark.parametrize(("server", "name"), ALL)
def test_every_name_of_a_server_is_read_or_refused_with_the_reason(server: str, name: str) -> None:
    if name in REFUSED:
        for given in (name, f"{server}:{name}"):
            with pytest.raises(ValueError, match=f"'{given}' is not read: "):
                find_format(given)
        return
    fmt = find_format(f"{server}:{name}")
    assert (fmt is find_format(name)) == ((server, name) not in OTHER_FORMATS)
    (call,) = parse(fmt.example, fmt).tool_calls
    assert call.name == "weather"


def test_a_name_that_means_another_format_there() -> None:
    text = (
        "<tool_calls><tool_call>now<tool_sep><arg_key>zone</arg_key><arg_value>UTC</arg_value></tool_call></tool_calls>"
    )
    assert [call.arguments_dict() for call in parse(text, "sglang:hunyuan", prefill="").tool_calls] == [{"zone": "UTC"}]
    with pytest.raises(ValueError, match=r"sglang 0\.5\.23 has no tool-call parser 'seed_oss'; it has: apertus2509, "):
        find_format("sglang:seed_oss")
    with pytest.raises(ValueError, match="unknown tool-call format 'hy_v3:a b'"):
        find_format("hy_v3:a b")


SPACED = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="n" string="false">2</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
# What each format's own model writes, and a server reads, where the example of the format says nothing of it.
WRITTEN: list[tuple[str, str, dict[str, Any]]] = [
    ("deepseek_v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f"/>\n</｜DSML｜tool_calls>', {}),
    ("deepseekv41", SPACED, {"n": 2}),
    (
        "minicpm5",
        '<function name="f"><param name="t"><![CDATA[a </param> & b\n]]></param></function>',
        {"t": "a </param> & b\n"},
    ),
    ("minicpm5", '<function name="f"><param name="n">2</param></function>', {"n": 2}),
    ("mimo", "<tool_call><function=f><parameter=t>\nab\n</parameter></function></tool_call>", {"t": "\nab\n"}),
    ("lfm2", '<|tool_call_start|>[{"name": "f", "arguments": {"n": 2}}]<|tool_call_end|>', {"n": 2}),
    ("lfm2", '<|tool_call_start|>{"name": "f", "arguments": {"n": 2}}<|tool_call_end|>', {"n": 2}),
    ("interns1", '<|action_start|> <|plugin|>\n{"name": "f", "parameters": {"n": 2}}<|action_end|>', {"n": 2}),
    ("spark25", "<tool_call>f<arg_key>n</arg_key><arg_value>2</arg_value></tool_call>", {"n": "2"}),
    (
        "hy_v4:v",
        "<tool_calls:v><tool_call:v>f<arg_key:v>n</arg_key:v><arg_value:v>a</arg_value:v></tool_call:v></tool_calls:v>",
        {"n": "a"},
    ),
]


@pytest.mark.parametrize(("name", "text", "arguments"), WRITTEN)
def test_what_a_model_writes(name: str, text: str, arguments: dict[str, Any]) -> None:
    message = parse(text, name, prefill="")
    assert [(call.name, call.arguments_dict()) for call in message.tool_calls] == [("f", arguments)]
    assert (message.content, message.malformed) == ("", ())


def test_the_text_of_cohere_command_4_is_content() -> None:
    assert parse("<|START_TEXT|>Hello<|END_TEXT|>", "cohere_command4", prefill="").content == "Hello"

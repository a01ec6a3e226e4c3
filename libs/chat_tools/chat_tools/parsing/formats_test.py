"""Each format as its models write it, spelled out by hand; and what a format of one's own gets by its writer."""

import json
from typing import Any

import pytest

from chat_tools import Format, Json, StreamParser, find_format, formats, parse
from chat_tools.__main__ import main
from chat_tools.known_formats.writing import objects
from chat_tools.parsing.formats import ALIASES, FORMATS

TOOLS = [
    {
        "name": "f",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}},
    }
]
BOTH = [("f", {"city": "Paris", "n": 3}), ("g", {})]
ONE = BOTH[:1]


def dsml(wrapper: str) -> str:
    """Two calls in DeepSeek's markup language."""
    city = '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>'
    count = '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>'
    first = f'<｜DSML｜invoke name="f">\n{city}\n{count}\n</｜DSML｜invoke>'
    second = '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>'
    return f"Look.\n<｜DSML｜{wrapper}>\n{first}\n{second}\n</｜DSML｜{wrapper}>"


K3 = (
    "<|open|>think<|sep|>so<|close|>think<|sep|><|open|>response<|sep|>Look.<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
    '<|open|>argument key="n" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>'
)

NS = "]<]minimax[>["
M3 = (
    f'<mm:think>so</mm:think>Look.\n{NS}<tool_call>\n{NS}<invoke name="f">\n{NS}<city>Paris{NS}</city>\n'
    f'{NS}<n>3{NS}</n>\n{NS}</invoke>\n{NS}<invoke name="g">\n{NS}</invoke>\n{NS}</tool_call>[e~['
)

TURNS = [
    ("olmo3", 'Look.\n<function_calls>\nf(city="Paris", n=3)\ng()\n</function_calls>', BOTH),
    ("olmo3", '<function_calls>f(city="Paris", n=3)', ONE),
    ("olmo3", '<function_calls>[f(city="Paris", n=3), g()]</function_calls>', BOTH),
    ("lfm2", "<|tool_call_start|>[f(city='Paris', n=3), g()]<|tool_call_end|>Look.", BOTH),
    ("xlam", '[{"name": "f", "arguments": {"city": "Paris", "n": 3}}, {"name": "g", "arguments": {}}]', BOTH),
    ("xlam", 'Look.<tool_call>[{"name": "f", "arguments": {"city": "Paris", "n": 3}}]</tool_call>', ONE),
    ("phi4_mini", 'functools[{"name": "f", "arguments": {"city": "Paris", "n": 3}}]', ONE),
    ("hunyuan", 'Look.<tool_calls>[{"name": "f", "arguments": {"city": "Paris", "n": 3}}]</tool_calls>', ONE),
    (
        "jamba",
        '<tool_calls>[\n  {"name": "f", "arguments": "{\\"city\\": \\"Paris\\", \\"n\\": 3}"}\n]</tool_calls>',
        ONE,
    ),
    (
        "minimax_m1",
        (
            'Look.\n<tool_calls>\n{"name": "f", "arguments": {"city": "Paris", "n": 3}}\n'
            '{"name": "g", "arguments": {}}\n</tool_calls><end_of_sentence>'
        ),
        BOTH,
    ),
    ("functionary_v3.2", 'all\nLook.>>>f\n{"city": "Paris", "n": 3}>>>g\n{}<|eot_id|>', BOTH),
    ("functionary_v3.2", '>>>all\nLook.>>>f\n{"city": "Paris", "n": 3}', ONE),
    (
        "dots",
        (
            'Look.<dots_function_call>\n{"name": "f", "arguments": {"city": "Paris", "n": 3}}\n'
            '<invoke name="g">\n</invoke>\n</dots_function_call>'
        ),
        BOTH,
    ),
    ("longcat", '<longcat_tool_call>{"name": "f", "arguments": {"city": "Paris", "n": 3}}</longcat_tool_call>', ONE),
    (
        "internlm",
        '<|action_start|><|plugin|>\n{"name": "f", "parameters": {"city": "Paris", "n": 3}}<|action_end|>',
        ONE,
    ),
    ("apertus", '<|tools_prefix|>[{"f": {"city": "Paris", "n": 3}}, {"g": {}}]<|tools_suffix|>', BOTH),
    ("gigachat3", 'Look. function call<|role_sep|>\n{"name": "f", "arguments": {"city": "Paris", "n": 3}}</s>', ONE),
    ("gigachat3", 'Look. <|function_call|>{"name": "f", "arguments": {"city": "Paris", "n": 3}}</s>', ONE),
    (
        "cohere",
        (
            '<|START_THINKING|>so<|END_THINKING|><|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "f", '
            '"parameters": {"city": "Paris", "n": 3}}, {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]'
            "<|END_ACTION|>"
        ),
        BOTH,
    ),
    (
        "step3",
        (
            '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">'
            '<steptml:parameter name="city">Paris</steptml:parameter><steptml:parameter name="n">3</steptml:parameter>'
            "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>"
        ),
        ONE,
    ),
    (
        "ernie",
        (
            'so\n</think>\n\n\n<tool_call>\n{"name": "f", "arguments": {"city": "Paris", "n": 3}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n'
        ),
        BOTH,
    ),
    ("kimi_k3", K3, BOTH),
    ("minimax_m3", M3, BOTH),
    ("deepseek_v3.2", dsml("function_calls"), BOTH),
    ("deepseek_v4", dsml("tool_calls"), BOTH),
]


@pytest.mark.parametrize(("name", "text", "calls"), TURNS)
def test_a_turn_as_a_model_writes_it(name: str, text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    message = parse(text, name, TOOLS)
    assert [(call.name, call.arguments_dict()) for call in message.tool_calls] == calls
    assert not message.malformed
    assert message.content in ("", "Look.")
    assert message.reasoning in ("", "so")
    for end in range(len(text)):  # cut anywhere: no half-written value is a call
        for call in parse(text[:end], name, TOOLS).tool_calls:
            assert (call.name, call.arguments_dict()) in calls


def test_the_attribute_says_what_is_text() -> None:
    """Where the model says it the schema does not decide; without it, or where nothing is declared, it does."""

    def arguments(attribute: str, value: str, tools: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        tag = f'<｜DSML｜parameter name="n"{attribute}>{value}</｜DSML｜parameter>'
        text = f'<｜DSML｜tool_calls><｜DSML｜invoke name="f">{tag}</｜DSML｜invoke></｜DSML｜tool_calls>'
        (call,) = parse(text, "deepseek_v4", tools).tool_calls
        return call.arguments_dict()

    assert arguments(' string="true"', "3", TOOLS) == {"n": "3"}
    assert arguments(' string="false"', "3") == {"n": 3}
    assert arguments(' string="false"', '[1, "a"]') == {"n": [1, "a"]}
    assert arguments(' string="false"', "words") == {"n": "words"}
    assert arguments("", "3", TOOLS) == {"n": 3}
    assert arguments("", "3") == {"n": "3"}


def test_kimi_k3_says_the_type_and_escapes_what_stands_in_quotes() -> None:
    def arguments(key: str, kind: str, value: str) -> dict[str, Any]:
        tag = f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        text = (
            f'<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>{tag}<|close|>call<|sep|><|close|>tools<|sep|>'
        )
        (call,) = parse(text, "kimi_k3", TOOLS).tool_calls
        assert call.name == "f"
        return call.arguments_dict()

    assert arguments("n", "string", "3") == {"n": "3"}
    assert arguments("x", "number", "3") == {"x": 3}
    assert arguments("x", "object", '{"a": [1]}') == {"x": {"a": [1]}}
    assert arguments("a&amp;quot;b", "string", "<b>&amp;</b>") == {"a&quot;b": "<b>&amp;</b>"}
    assert arguments("&quot;a&quot;", "string", "") == {'"a"': ""}
    fmt = find_format("kimi_k3")
    odd = {'a"&b': 'x"', "flag": True, "none": None, "list": [1, "a"]}
    (call,) = parse(fmt.write([("f", odd)]), fmt).tool_calls
    assert call.arguments_dict() == odd


MUSE = (
    " to=self<|message|>so<|eom|><|start|>assistant to=user<|message|>Look.<|eom|>"
    '<|start|>assistant to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n'
    '<atem:parameter name="city">Paris</atem:parameter>\n<atem:parameter name="n">3</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=g<|message|><atem:function_calls>\n"
    '<atem:invoke name="g">\n</atem:invoke>\n</atem:function_calls><|eot|>'
)


@pytest.mark.parametrize("prefill", [None, "", "<|start|>assistant"])
def test_muse_glimmer_calls_in_messages_of_their_own(prefill: str | None) -> None:
    message = parse(MUSE, "muse_glimmer", TOOLS, prefill=prefill)
    assert [(call.name, call.arguments_dict()) for call in message.tool_calls] == BOTH
    assert (message.reasoning, message.content, message.malformed) == ("so", "Look.", ())
    # The end of a message closes no thought that the prompt might have begun.
    later = parse(MUSE[MUSE.index("<|start|>assistant to=f") :], "muse_glimmer", TOOLS, prefill=prefill)
    assert [call.name for call in later.tool_calls] == ["f", "g"]
    assert parse(" going to=here and to=there", "muse_glimmer", prefill="").content == " going to=here and to=there"
    for quoted in ("In short: ", " to=user<|message|>", " to=self<|message|>", " to=self<|message|>I say", " to=f: "):
        text = quoted + "<atem:function_calls>" + MUSE.partition("<atem:function_calls>")[2]
        assert [call.name for call in parse(text, "muse_glimmer", TOOLS, prefill="").tool_calls] == ["g"]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_header_of_a_call_ends_thinking_that_is_not_closed(size: int) -> None:
    """As muse_glimmer's engine has it; in text, where a header may be quoted, if asked for."""
    thought = "say to=user, to=g<|message|>hi, to=self<|message|><atem:function_calls>"
    text = f" to=self<|message|>{thought} to=f<|message|>" + MUSE.partition(" to=f<|message|>")[2]
    for asked, calls, reasoning in ((True, BOTH, thought), (None, BOTH[1:], text[19 : text.index("<|eom|>")])):
        stream = StreamParser("muse_glimmer", TOOLS, prefill="<|start|>assistant", call_ends_reasoning=asked)
        for at in range(0, len(text), size):
            stream.feed(text[at : at + size])
        message = stream.finish()
        assert [(call.name, call.arguments_dict()) for call in message.tool_calls] == calls
        assert (message.reasoning, message.content, message.malformed) == (reasoning.strip(), "", ())


def test_text_that_only_looks_like_a_list_of_calls_is_content() -> None:
    for name, text in [("phi4_mini", "functools.lru_cache is a decorator"), ("xlam", "[1, 2] is a list")]:
        assert parse(text, name).content == text
        assert not parse(text, name).malformed


@pytest.mark.parametrize("name", formats())
def test_every_format_shows_itself(name: str) -> None:
    fmt = find_format(name)
    (call,) = parse(fmt.example, fmt).tool_calls
    assert call.name == "weather"
    assert call.arguments_dict()["city"] == "Paris"
    assert all(find_format(alias) is fmt for alias in fmt.aliases)


def test_names_are_not_given_twice() -> None:
    assert not ALIASES.keys() & FORMATS.keys()
    assert len(ALIASES) == sum(len(fmt.aliases) for fmt in FORMATS.values())


def test_a_format_of_ones_own() -> None:
    mine = Format("acme", calls=(("<call>", "</call>"),), body=Json(), writer=objects)
    (call,) = parse(mine.example, mine).tool_calls
    assert json.loads(call.arguments) == {"city": "Paris", "days": 3}
    with pytest.raises(ValueError, match="'acme' has no writer"):
        mine._replace(writer=None).write([])


def test_every_format_has_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats"]) == 0
    page = capsys.readouterr().out
    assert all(f"## {fmt.name}\n" in page and fmt.example in page for fmt in FORMATS.values())
    assert main(["formats", "deepseekv32"]) == 0
    assert capsys.readouterr().out.startswith("## deepseek_v3.2\n\nAlso called: deepseekv32, deepseek_v32.\n")


def test_what_wraps_an_answer_of_ernie_is_not_its_content() -> None:
    message = parse("so\n</think>\n\n\n<response>\nHello there.\n</response>\n", "ernie45")
    assert (message.content.strip(), message.reasoning, message.malformed) == ("Hello there.", "so", ())

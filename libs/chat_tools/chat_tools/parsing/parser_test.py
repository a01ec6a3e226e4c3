import json

import pytest

from chat_tools.parsing.parser import StreamParser, parse
from chat_tools.parsing.result import CallFinished, Retracted, TextDelta

CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"


def test_one_call_with_thinking_and_text():
    message = parse(f"<think>\nI should look.\n</think>\n\nLet me see.\n\n{CALL}<|im_end|>", "qwen3_xml")
    assert message.reasoning == "I should look."
    assert message.content == "Let me see."
    (call,) = message.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    assert message.text[slice(*call.span)] == CALL
    assert not message.malformed


def test_plain_text_is_untouched():
    assert parse("  5 < 6 and <b>bold</b>\n", "qwen3_xml").content == "  5 < 6 and <b>bold</b>\n"


def test_a_stream_reports_as_it_goes():
    parser = StreamParser("qwen3_xml")
    assert parser.feed("Let me s") == [TextDelta("content", "Let me s")]
    assert parser.feed("ee.<tool_") == [TextDelta("content", "ee.")]
    events = parser.feed(CALL.removeprefix("<tool_")) + parser.feed("!")
    assert [type(e) for e in events] == [CallFinished, TextDelta]
    assert parser.finish().content == "Let me see.!"


def test_thinking_that_the_prompt_opened():
    text = f"Maybe {CALL}?\n</think>\n\nDone."
    parser = StreamParser("qwen3_xml")
    assert [type(e) for e in parser.feed(text)] == [TextDelta, CallFinished, TextDelta, Retracted, TextDelta]
    message = parser.finish()
    assert (message.reasoning, message.content, message.tool_calls) == (f"Maybe {CALL}?", "Done.", ())
    prefilled = parse(text, "qwen3_xml", prefill="<think>\n")
    assert (prefilled.reasoning, prefilled.content, prefilled.tool_calls) == (f"Maybe {CALL}?", "Done.", ())


def test_unknown_format_names_the_formats():
    with pytest.raises(ValueError, match="qwen3_xml"):
        parse("", "none")

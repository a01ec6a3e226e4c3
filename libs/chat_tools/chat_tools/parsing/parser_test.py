import json

import pytest

from chat_tools.parsing.parser import StreamParser, parse
from chat_tools.parsing.result import ArgumentsDelta, CallFinished, CallStarted, Retracted, TextDelta

CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"


def test_one_call_with_thinking_and_text() -> None:
    message = parse(f"<think>\nI should look.\n</think>\n\nLet me see.\n\n{CALL}<|im_end|>", "qwen3_xml")
    assert message.reasoning == "I should look."
    assert message.content == "Let me see."
    (call,) = message.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    assert message.text[slice(*call.span)] == CALL
    assert not message.malformed


def test_plain_text_is_untouched() -> None:
    assert parse("  5 < 6 and <b>bold</b>\n", "qwen3_xml").content == "  5 < 6 and <b>bold</b>\n"


def test_a_stream_reports_as_it_goes() -> None:
    parser = StreamParser("qwen3_xml", prefill="")
    assert parser.feed("Let me s") == [TextDelta("content", "Let me s")]
    assert parser.feed("ee.<tool_") == [TextDelta("content", "ee.")]
    events = parser.feed(CALL.removeprefix("<tool_")) + parser.feed("!")
    assert [type(e) for e in events] == [CallStarted, ArgumentsDelta, CallFinished, TextDelta]
    assert parser.finish().content == "Let me see.!"


def test_thinking_that_the_prompt_opened() -> None:
    text = f"Maybe {CALL}?\n</think>\n\nDone."
    parser = StreamParser("qwen3_xml")
    assert [type(e) for e in parser.feed(text)] == [TextDelta, TextDelta, Retracted, TextDelta]
    message = parser.finish()
    assert (message.reasoning, message.content, message.tool_calls) == (f"Maybe {CALL}?", "Done.", ())
    prefilled = parse(text, "qwen3_xml", prefill="<think>\n")
    assert (prefilled.reasoning, prefilled.content, prefilled.tool_calls) == (f"Maybe {CALL}?", "Done.", ())


def test_unknown_format_names_the_formats() -> None:
    with pytest.raises(ValueError, match="qwen3_xml"):
        parse("", "none")


ASKED = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def reported(parser: StreamParser, text: str) -> tuple[list[str], list[str]]:
    """The names of the calls reported while a text is fed letter by letter, and of all by its end."""
    early = [e.call.name for c in text for e in parser.feed(c) if isinstance(e, CallFinished)]
    message = parser.finish()
    late = [e.call.name for e in parser.last_events() if isinstance(e, CallFinished)]
    assert early + late == [c.name for c in message.tool_calls]
    return early, early + late


def test_a_reported_call_is_never_retracted() -> None:
    """Without a prefill a call is reported once it is known to be no reasoning; with one, as soon as it is complete."""
    assert reported(StreamParser("hermes"), f"{ASKED} hm </think> no") == ([], [])
    assert reported(StreamParser("hermes"), f"{ASKED} hm </think>{ASKED}") == (["f"], ["f"])
    assert reported(StreamParser("hermes"), f"{ASKED} done") == ([], ["f"])
    assert reported(StreamParser("hermes"), f"{ASKED} <think>x</think> done") == (["f"], ["f"])
    assert reported(StreamParser("hermes", prefill=""), f"{ASKED} hm </think> no") == (["f"], ["f"])
    assert reported(StreamParser("hermes", prefill="<think>"), f"{ASKED} hm </think> no") == ([], [])
    assert reported(StreamParser("harmony"), "<|channel|>commentary to=f<|message|>{}<|call|>x")[0] == ["f"]


def test_a_message_for_the_next_turn_keeps_what_was_malformed() -> None:
    broken = '<tool_call>{"name": "g", "arguments": {</tool_call>'
    message = parse(f"<think>so</think>Look. {ASKED}{broken} Done.", "hermes")
    assert len(message.malformed) == len(message.tool_calls) == 1
    sent = message.to_message()
    assert sent["content"] == f"Look. {broken} Done."
    assert sent["reasoning_content"] == "so"
    assert sent["tool_calls"][0]["function"]["arguments"] == {}
    assert parse("Hi", "hermes").to_message() == {"role": "assistant", "content": "Hi"}


def test_calls_in_the_shape_of_openai() -> None:
    two = parse(ASKED.replace("{}}", '{"a": 1}}') + ASKED, "hermes")
    (first, second) = two.to_openai(first_call=3)["tool_calls"]
    assert first == {"type": "function", "id": "call00003", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert second["id"] == "call00004"
    assert second["function"]["arguments"] == "{}"
    kept = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert parse(kept, "kimi_k2").to_openai()["tool_calls"][0]["id"] == "functions.f:7"
    assert parse(kept, "kimi_k2").to_message()["tool_calls"][0]["id"] == "functions.f:7"


def test_white_space_that_borders_on_a_call_is_trimmed_on_both_sides_of_it() -> None:
    assert parse(f"Look.\n\n{ASKED}\n", "hermes").content == "Look."
    assert parse(f"\n{ASKED}\nSo.", "hermes").content == "So."
    assert parse(f"Look. {ASKED} So.\n", "hermes").content == "Look.  So.\n"

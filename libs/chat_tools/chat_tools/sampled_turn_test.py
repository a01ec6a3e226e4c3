"""Special tokens are markers; the same characters, written letter by letter, are text."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_tools.parsing.formats import FORMATS, find_format
from chat_tools.parsing.parser import StreamParser, parse
from chat_tools.parsing.result import CallFinished, TextDelta
from chat_tools.parsing.token_text import TokenText
from chat_tools.sampled_turn import parse_ids
from chat_tools.testing.tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer("chatml")
TOKENIZER.add_tokens(["<|open|>", "<|sep|>", "<|close|>", "[TOOL_CALLS]", "<|tool_call>", "<tool_call|>"])
BITS = ("<think>", "</think>", "é 漢 \U0001f600", "<tool", "a\n", "<|im_end|>")
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "<tool_call>"}}\n</tool_call>'


def letters(text: str) -> list[int]:
    """A text as a model spells it: no character is part of a special token."""
    return [token for letter in text for token in TOKENIZER.encode(letter, add_special_tokens=False)]


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def test_a_marker_that_is_spelled_is_no_call() -> None:
    quoted = parse_ids(letters(f"Write {CALL} so.<|im_end|>"), TOKENIZER, "hermes", prefill="")
    assert (quoted.content, quoted.tool_calls, quoted.malformed) == (f"Write {CALL} so.<|im_end|>", (), ())
    assert len(parse(quoted.text, "hermes", prefill="").tool_calls) == 1
    spelled = '{"name": "f", "arguments": {"x": "</tool_call><tool_call>"}}'
    call = [*ids("<tool_call>\n"), *letters(spelled), *ids("\n</tool_call><|im_end|>")]
    message = parse_ids(call, TOKENIZER, "hermes", prefill="")
    assert [c.arguments for c in message.tool_calls] == ['{"x": "</tool_call><tool_call>"}']
    assert message.text == TOKENIZER.decode(call)


def test_a_marker_of_which_a_token_is_a_part() -> None:
    call = find_format("kimi_k3").example
    assert len(parse_ids(ids(call), TOKENIZER, "kimi_k3", prefill="").tool_calls) == 1
    assert parse_ids(letters(call), TOKENIZER, "kimi_k3", prefill="").content == call


@pytest.mark.parametrize("name", ["qwen3_xml", "hermes", "mistral", "gemma", "kimi_k3", "harmony", "llama3_json"])
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_stream_of_tokens_gives_what_the_whole_gives(name: str, data: st.DataObject) -> None:
    bits = st.sampled_from(
        [FORMATS[name].example, CALL, "<think>", "</think>", "é 漢 \U0001f600", "<tool", "a\n", "<|im_end|>"]
    )
    parts = data.draw(st.lists(st.tuples(bits, st.booleans()), max_size=6))
    tokens = [token for text, spelled in parts for token in (letters if spelled else ids)(text)]
    whole = parse_ids(tokens, TOKENIZER, name, prefill="")
    assert whole.text == TOKENIZER.decode(tokens)
    stream = StreamParser(name, prefill="", tokenizer=TOKENIZER)
    events: list[Any] = [event for token in tokens for event in stream.feed([token])]
    assert stream.finish() == whole
    events += stream.last_events()
    assert [e.call.arguments for e in events if isinstance(e, CallFinished)] == [c.arguments for c in whole.tool_calls]
    if not any(spelled for _, spelled in parts):
        assert whole == parse(whole.text, name, prefill="", call_ends_reasoning=bool(_ends(name)))


def _ends(name: str) -> bool:
    """Whether a call ends thinking here: the engine does so, and the marker is a token."""
    return FORMATS[name].call_ends_reasoning


def test_a_character_that_is_cut_off_and_a_held_beginning_are_told_at_the_end() -> None:
    cut = ids("漢")[:-1]
    stream = StreamParser("hermes", prefill="", tokenizer=TOKENIZER)
    assert stream.feed([*ids("a"), *letters("<tool_")]) == [TextDelta("content", "a")]
    assert stream.finish(cut).content == TOKENIZER.decode([*ids("a"), *letters("<tool_"), *cut])


def test_a_call_inside_thinking_that_is_not_closed() -> None:
    """As the model's own engine has it: Qwen3.5's ends the thinking there, Hermes' does not; it can be chosen."""
    for name, ends in (("qwen3_xml", True), ("hermes", False)):
        text = f"so\n{FORMATS[name].example}"
        for chosen, expected in ((None, ends), (True, True), (False, False)):
            message = parse_ids(ids(text), TOKENIZER, name, prefill="<think>\n", call_ends_reasoning=chosen)
            assert bool(message.tool_calls) == expected
            assert message.reasoning.startswith("so")
            assert ("tool_call" in message.reasoning) != expected
        assert not parse(text, name, prefill="<think>\n").tool_calls  # in text it may be quoted
        assert parse(text, name, prefill="<think>\n", call_ends_reasoning=True).tool_calls
        spelled = parse_ids(letters(text), TOKENIZER, name, prefill="<think>\n")
        assert (spelled.tool_calls, spelled.reasoning) == ((), text.strip())


def test_a_header_ends_thinking_where_tokens_are_parsed() -> None:
    """Muse Glimmer's engine has it so; the same characters spelled by the model are thoughts."""
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.add_tokens(["<|message|>", "<|start|>", "<|eom|>"])
    call = FORMATS["muse_glimmer"].example
    text = f" to=self<|message|>so{call[call.index(' to=') :]}"
    whole = tokenizer.encode(text, add_special_tokens=False)
    message = parse_ids(whole, tokenizer, "muse_glimmer", prefill="<|start|>assistant")
    assert (message.reasoning, len(message.tool_calls)) == ("so", len(parse(call, "muse_glimmer").tool_calls))
    first = tokenizer.encode(" to=self<|message|>", add_special_tokens=False)
    spelled = [token for letter in text[19:] for token in tokenizer.encode(letter, add_special_tokens=False)]
    quoted = parse_ids([*first, *spelled], tokenizer, "muse_glimmer", prefill="<|start|>assistant")
    assert (quoted.reasoning, quoted.tool_calls) == (text[19:].strip(), ())


def test_what_is_fed_fits_the_parser() -> None:
    with pytest.raises(ValueError, match="tokenizer=tokenizer"):
        StreamParser("hermes").feed([1])
    with pytest.raises(ValueError, match="fed with token ids"):
        StreamParser("hermes", tokenizer=TOKENIZER).feed("text")
    with pytest.raises(ValueError, match="fast tokenizer"):
        TokenText(object(), FORMATS["hermes"])


def test_a_lone_surrogate_and_a_noncharacter() -> None:
    text = '{"name": "f", "arguments": {"x": "<tool_call>\\\\ud800 \\ud800", "y": "\ufdd0"}}'
    message = parse_ids([*ids("<tool_call>"), *letters(text), *ids("</tool_call>")], TOKENIZER, "hermes", prefill="")
    (call,) = message.tool_calls
    assert call.arguments_dict() == {"x": "<tool_call>\\ud800 \ud800", "y": "\ufffd"}


def test_a_token_that_is_added_later_is_a_marker_from_then_on() -> None:
    """Until then its text is one."""
    tokenizer, call = tiny_tokenizer("chatml"), FORMATS["mistral"].example
    spelled = tokenizer.encode(call, add_special_tokens=False)

    def calls(sampled: list[int]) -> int:
        return len(parse_ids(sampled, tokenizer, "mistral", prefill="").tool_calls)

    assert calls(spelled) > 0
    tokenizer.add_tokens(["[TOOL_CALLS]"])
    assert calls(spelled) == 0
    assert calls(tokenizer.encode(call, add_special_tokens=False)) > 0

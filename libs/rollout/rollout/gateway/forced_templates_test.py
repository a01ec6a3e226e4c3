"""tool_choice through the chat templates of real models (TRL's wheel)."""

import pytest

from chat_tools.conformance.real_templates import family_of, real_tokenizer
from chat_tools.parsing.parser import parse
from rollout.chat.chat import Chat
from rollout.gateway.forced_call import forced_call
from rollout.tools.tool import Tool

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [Tool(name, "", OBJECT, print) for name in ("add", "multiply")]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen2_5", "glm4moe"])
def test_real_templates_calls_begin_so_that_they_can_be_forced(name: str) -> None:
    """Held to the parser: with the arguments of a call after them, the given tokens are that call."""
    family = family_of(name)
    end = (family.closings or family.stops)[0]
    formats = {"qwen3": "hermes", "qwen2_5": "hermes", "glm4moe": "glm-4.5"}
    chat = Chat(real_tokenizer(name), end_of_turn=end, tool_format=formats.get(name, "qwen3_xml"))
    rest = {
        "hermes": '"arguments": {"a": 1}}\n</tool_call>',
        "glm-4.5": "<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "qwen3_xml": "<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    }[str(chat.tool_format)]
    text = chat.tokenizer.decode(forced_call(chat, TOOLS, "multiply"))
    text = text.rpartition('"arguments"')[0] or text
    schemas = [tool.schema for tool in TOOLS]
    parsed = parse(text + rest, chat.tool_format, schemas, prefill=chat.prefill)
    assert [(c.name, c.arguments) for c in parsed.tool_calls] == [("multiply", '{"a": 1}')]
    assert (parsed.reasoning, parsed.content) == ("", "")
    either = chat.tokenizer.decode(forced_call(chat, TOOLS, None))
    assert text.startswith(either)
    assert "multiply" not in either

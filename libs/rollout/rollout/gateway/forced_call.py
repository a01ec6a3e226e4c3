"""`tool_choice` without a grammar: the beginning of a call is given, so that the model can only continue it.

The beginning is what the chat template writes for a call, token by token up to where the offered tools (or the named
one's arguments) first differ. It is given, not sampled: nothing of it is trained, and the log-probs of what follows are
exactly those of a model that read it. The model writes the rest itself: arguments that no parser can read are content.
"""

from collections.abc import Sequence
from typing import Any

from chat_tools.known_formats.grammar import Format
from chat_tools.parsing.formats import find_format
from rollout.chat.chat import Chat
from rollout.chat.messages import Message
from rollout.tools.tool import Tool

ARGUMENTS: tuple[dict[str, Any], ...] = ({}, {"a": "a"}, {"z": 1})  # every call has their common beginning


def forced_call(chat: Chat, tools: Sequence[Tool], name: str | None) -> list[int]:
    """Return the tokens that begin a turn which calls `name` (None: any of the tools).

    Raises ValueError where the template's calls do not begin in a way that forces one.
    """
    names = [tool.name for tool in tools] if name is None else [name]
    turns = [_turn(chat, tools, called, arguments) for called in names for arguments in ARGUMENTS]
    ids = [chat.tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in turns]
    count = next((i for i, column in enumerate(zip(*ids, strict=False)) if len(set(column)) > 1), min(map(len, ids)))
    beginning = [int(token) for token in ids[0][:count]]
    text = str(chat.tokenizer.decode(beginning, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    marks = openings(find_format(chat.tool_format))
    if not any(mark in text for mark in marks) or (name is not None and name not in text):
        raise ValueError(f"the chat template's calls begin with {text!r}, which does not force one")
    return beginning


def _turn(chat: Chat, tools: Sequence[Tool], name: str, arguments: dict[str, Any]) -> str:
    """Render a turn that makes this call, from where the generation prompt ends."""
    messages: list[Message] = [{"role": "user", "content": "x"}]
    call = {"type": "function", "id": "call00000", "function": {"name": name, "arguments": arguments}}
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt = chat.render(messages, tools, add_generation_prompt=True)
    whole = chat.render([*messages, turn], tools, add_generation_prompt=False)
    if not whole.startswith(prompt):
        raise ValueError("the chat template writes a turn with a call in another way than it asks for one")
    text = whole[len(prompt) :]
    ids = chat.tokenizer(text.partition(chat.end_of_turn)[0], add_special_tokens=False)["input_ids"]
    calls = chat.read(ids, finished=False, tools=tools).tool_calls  # as a sampled turn is read: its tokens
    if [call.name for call in calls] != [name]:
        raise ValueError(f"the chat template writes calls in another format than {chat.tool_format}")
    return text


def openings(fmt: Format) -> list[str]:
    """Return the texts with which calls of a format begin."""
    section = [fmt.section[0]] if fmt.section else []
    return [mark for mark in (*section, *(opening for opening, _ in fmt.calls), fmt.opening) if mark]

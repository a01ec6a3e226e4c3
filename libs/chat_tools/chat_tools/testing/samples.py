"""Well-formed turns in every format, written from a list of calls: for round trips, agreement and speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chat_tools.known_formats import writing
from chat_tools.known_formats.grammar import Call
from chat_tools.parsing.formats import find_format


def write_turn(name: str, calls: Sequence[Call], content: str = "", reasoning: str = "") -> str:
    """Return a turn as a model trained on the format writes it."""
    return writing.write_turn(find_format(name), calls, content, reasoning)


def _tool(name: str, **properties: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


MALFORMED_TOOLS = [
    _tool("add", a={"type": "integer"}, b={"type": "integer"}),
    _tool("write", text={"type": "string"}),
    _tool("note", tag={"anyOf": [{"type": "string"}, {"type": "null"}]}),
    _tool("many", items={"type": "array"}),
    _tool("flag", on={"type": "boolean"}),
    _tool("ratio", x={"type": "number"}),
    _tool("deep", o={"type": "object"}),
    _tool("ping"),
]
"""The tools of the calls in malformed.jsonl."""

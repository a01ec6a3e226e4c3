"""Well-formed turns in every format, written from a list of calls: for round trips, agreement and speed."""

from __future__ import annotations

from collections.abc import Sequence

from chat_tools.known_formats import writing
from chat_tools.known_formats.grammar import Call
from chat_tools.parsing.formats import find_format


def write_turn(name: str, calls: Sequence[Call], content: str = "", reasoning: str = "") -> str:
    """Return a turn as a model trained on the format writes it."""
    return writing.write_turn(find_format(name), calls, content, reasoning)

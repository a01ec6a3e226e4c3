"""Sampled tokens to a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chat_tools.known_formats.grammar import Format
from chat_tools.parsing.parser import StreamParser
from chat_tools.parsing.result import ParsedMessage


def parse_ids(
    ids: Sequence[int],
    tokenizer: Any,
    format: str | Format,  # noqa: A002 - the public name
    tools: Sequence[Any] | None = None,
    *,
    prefill: str | None = None,
    call_ends_reasoning: bool | None = None,
) -> ParsedMessage:
    """Parse the sampled tokens of one assistant turn: special tokens are markers, the same characters are text.

    The arguments are StreamParser's. ValueError for a tokenizer that is not a fast one.
    """
    parser = StreamParser(
        format, tools, prefill=prefill, silent=True, tokenizer=tokenizer, call_ends_reasoning=call_ends_reasoning
    )
    return parser.finish(ids)

"""Rows of a file as conversations: what a row may hold is checked here, before any tokenizer sees it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apps.common.prompts import ROLES, Row, read_rows

Message = dict[str, Any]
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a row and the tools they could call; `row` counts from 1."""

    row: int
    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None

    @property
    def key(self) -> str:
        """A digest of every message and tool: equal for identical conversations, the same in every run."""
        content = json.dumps(
            [self.messages, self.tools], sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str
        )
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def read_conversations(path: Path, messages_column: str, tools_column: str) -> list[Conversation]:
    """Read every row of a .jsonl or .parquet file.

    Messages, tools and tool calls may be JSON text. Nulls of a Parquet file are left out: there, each message has the
    keys of all. Images, videos and audio are refused, for nothing here trains on them.

    Raises:
        ValueError: the file or a row can't be used; the text names file, row and the remedy.
    """
    found = []
    for number, row in enumerate(read_rows(path), start=1):
        try:
            plain = _without_nulls(row) if path.suffix == ".parquet" else row
            found.append(_conversation(number, plain, messages_column, tools_column))
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: {error}") from error
    return found


def _conversation(number: int, row: Row, messages_column: str, tools_column: str) -> Conversation:
    if messages_column not in row:
        raise ValueError(f"no column {messages_column!r}; it has {', '.join(row)}. Name yours with --messages-column")
    media = [name for name in MEDIA_COLUMNS if row.get(name) and name != messages_column]
    if media:
        raise ValueError(f"column {media[0]!r} holds media, which this app can't train on yet: remove such rows")
    where = f"column {messages_column!r}"
    messages = _list(row[messages_column], f"{where}: expected a list of messages")
    if not messages:
        raise ValueError(f"{where}: expected a list of messages, got an empty one")
    tools = row.get(tools_column)
    listed = _list(tools, f"column {tools_column!r}: expected a list of tools") if tools else []
    return Conversation(
        number,
        tuple(_message(message, f"{where}, message {i}") for i, message in enumerate(messages, start=1)),
        tuple(listed) or None,
    )


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ValueError(f"{where}: a message needs a role of {', '.join(ROLES)}, got {message!r:.60}")
    content = message.get("content")
    if isinstance(content, list):
        _check_parts(content, where)
    elif content is None and not message.get("tool_calls"):
        raise ValueError(f"{where}: it has neither content nor tool_calls")
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"{where}: content must be a text or a list of parts, got {content!r:.60}")
    if not message.get("tool_calls"):
        return message
    calls = _list(message["tool_calls"], f"{where}: tool_calls must be a list")
    return {**message, "tool_calls": [_call(call, where) for call in calls]}


def _check_parts(parts: Sequence[Any], where: str) -> None:
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"{where}: a part of kind {kind!r}; only text parts can be trained yet, so remove such rows "
                '(a text part is {"type": "text", "text": ...})'
            )


def _call(call: Any, where: str) -> dict[str, Any]:
    """Return a call in OpenAI's form, with its arguments as the object that chat templates want."""
    if not isinstance(call, Mapping):
        raise ValueError(f"{where}: a tool call must be an object, got {call!r:.60}")
    wrapped = "function" in call
    function = call["function"] if wrapped else {key: call[key] for key in ("name", "arguments") if key in call}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: a tool call needs a function with a name, got {call!r:.60}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments, f"{where}: arguments of a tool call")
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{where}: arguments of a tool call must be an object, got {arguments!r:.60}")
    kept = {key: value for key, value in call.items() if key not in ("function", "name", "arguments")}
    return {"type": "function", **kept, "function": {**function, "arguments": arguments}}


def _list(value: Any, expected: str) -> list[Any]:
    """Return a list, or the list that a JSON text holds."""
    found = _json(value, expected) if isinstance(value, str) else value
    if not isinstance(found, list):
        raise ValueError(f"{expected}, got {value!r:.60}")
    return found


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what}: {text!r:.60} is not JSON ({error.msg})") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value

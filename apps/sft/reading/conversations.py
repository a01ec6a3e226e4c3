"""Rows of a file as conversations, checked before any tokenizer sees them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apps.common.data.prompts import ROLES, Row
from apps.sft.reading.row_images import with_row_images

Message = dict[str, Any]
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a row and its tools; `row` counts from 1. Turns before message `trained_from` are not trained."""

    row: int
    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None
    trained_from: int = 0

    @property
    def key(self) -> str:
        """A digest of every message and tool: equal for identical conversations, the same in every run."""
        content: list[Any] = [self.messages, self.tools]
        return digest([*content, self.trained_from] if self.trained_from else content)


def digest(content: Any) -> str:
    """Return a digest of JSON values that does not depend on the order of keys, the same in every run."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def conversation_of(
    number: int, row: Row, messages_column: str, tools_column: str, images_column: str | None = None
) -> Conversation:
    """Return the conversation of a row. Messages, tools and tool calls may be JSON text.

    `images_column`: where images may be besides the messages' parts, if the model sees; else they are refused, as
    videos and audio always are.

    Raises:
        ValueError: it can't be used; the text names the column and the remedy.
    """
    if messages_column not in row:
        raise ValueError(f"no column {messages_column!r}; it has {', '.join(row)}. Name yours with --messages-column")
    where = f"column {messages_column!r}"
    messages = messages_of(list_of(row[messages_column], f"{where}: expected a list of messages"), where, images_column)
    messages = shown(row, messages, images_column, messages_column)
    return Conversation(number, messages, tools_of(row, tools_column))


def shown(row: Row, messages: tuple[Message, ...], images_column: str | None, *columns: str) -> tuple[Message, ...]:
    """Return the messages with the row's images in their places.

    Raises:
        ValueError: the row has media that nobody reads, or images that do not fit its messages.
    """
    if images_column is None:
        check_no_media(row, *columns)
        return messages
    check_no_media(row, images_column, *columns)
    if images_column != "images" and images_column not in row:
        raise ValueError(
            f"no column {images_column!r}; it has {', '.join(row)}. Name the column of images with "
            "--media.images-column"
        )
    images = row.get(images_column) or ()
    return with_row_images(messages, images if isinstance(images, list | tuple) else (images,), images_column)


def check_no_media(row: Row, *columns: str) -> None:
    """Raise ValueError for a row with media in a column of a usual name that is not in `columns`."""
    media = [name for name in MEDIA_COLUMNS if row.get(name) and name not in columns]
    if media:
        raise ValueError(
            f"column {media[0]!r} holds media, which nobody reads here: remove such rows, or, for images of "
            "conversations, set --engine.vision to frozen or trained (and --media.images-column)"
        )


def tools_of(row: Row, column: str) -> tuple[Any, ...] | None:
    """Return the tools of a row, or none."""
    tools = row.get(column)
    return tuple(list_of(tools, f"column {column!r}: expected a list of tools")) or None if tools else None


def messages_of(messages: Sequence[Any], where: str, sees: str | None = None) -> tuple[Message, ...]:
    """Return checked messages, at least one; their contents may have image parts where `sees` is not None.

    Raises:
        ValueError: naming the message.
    """
    if not messages:
        raise ValueError(f"{where}: expected a list of messages, got an empty one")
    return tuple(
        _message(message, f"{where}, message {i}", sees is not None) for i, message in enumerate(messages, start=1)
    )


def _message(message: Any, where: str, sees: bool) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ValueError(f"{where}: a message needs a role of {', '.join(ROLES)}, got {message!r:.60}")
    content = message.get("content")
    if isinstance(content, list):
        _check_parts(content, where, sees)
    elif content is None and not message.get("tool_calls"):
        raise ValueError(f"{where}: it has neither content nor tool_calls")
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"{where}: content must be a text or a list of parts, got {content!r:.60}")
    if not message.get("tool_calls"):
        return message
    calls = list_of(message["tool_calls"], f"{where}: tool_calls must be a list")
    return {**message, "tool_calls": [_call(call, where) for call in calls]}


def _check_parts(parts: Sequence[Any], where: str, sees: bool) -> None:
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind == "image" and sees:
            continue
        if kind != "text" or not isinstance(part.get("text"), str):
            hint = "" if sees else "; images are seen with --engine.vision frozen or trained"
            raise ValueError(
                f"{where}: a part of kind {kind!r}, which nobody reads, so remove such rows "
                f'(a text part is {{"type": "text", "text": ...}}{hint})'
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
    others = {key: value for key, value in call.items() if key not in ("function", "name", "arguments")}
    return {"type": "function", **others, "function": {**function, "arguments": arguments}}


def list_of(value: Any, expected: str) -> list[Any]:
    """Return the list, or the list in a JSON text."""
    items = _json(value, expected) if isinstance(value, str) else value
    if not isinstance(items, list):
        raise ValueError(f"{expected}, got {value!r:.60}")
    return items


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what}: {text!r:.60} is not JSON ({error.msg})") from error


def without_nulls(value: Any) -> Any:
    """Return the value without null keys: in a Parquet file each message has the keys of all."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value

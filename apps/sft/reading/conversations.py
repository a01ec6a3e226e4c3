"""Rows of a file as conversations, checked before any tokenizer sees them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apps.common.data.prompts import ROLES
from apps.common.data.rows import Row
from apps.sft.reading.marks import split_marks
from apps.sft.reading.row_images import with_row_images

Message = dict[str, Any]
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""What a turn's `from` may be, and whose message it is. A `function_call` is the assistant's, and holds its calls."""
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a row and its tools. `row`: its place in the file, from 1.

    `completes`: the first message of the completion, where the row is a prompt and its completion. `marks`: of each
    message the weight that the row marks it with (None where it does not say); empty where none is marked.
    """

    row: int
    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None
    completes: int | None = None
    marks: tuple[float | None, ...] = ()

    @property
    def key(self) -> str:
        """A digest of every message and tool: equal for identical conversations, the same in every run."""
        content: list[Any] = [self.messages, self.tools]
        if self.marks:
            content.append(self.marks)
        return digest([*content, self.completes] if self.completes else content)

    @staticmethod
    def of(
        row: int, messages: Sequence[Message], tools: tuple[Any, ...] | None, completes: int | None = None
    ) -> "Conversation":
        """Return a conversation of messages that may have marks.

        Raises:
            ValueError: a mark can't be obeyed.
        """
        plain, marks = zip(*map(split_marks, messages), strict=True)
        return Conversation(row, plain, tools, completes, marks if any(mark is not None for mark in marks) else ())


def digest(content: Any) -> str:
    """Return a digest of JSON values that does not depend on the order of keys, the same in every run."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def conversation_of(
    number: int,
    row: Row,
    messages_column: str,
    tools_column: str,
    images_column: str | None = None,
    system_column: str | None = None,
) -> Conversation:
    """Return the conversation of a row. Messages, tools and tool calls may be JSON text.

    `images_column`: where images may be besides the messages' parts, if the model sees; else they are refused, as
    videos and audio always are. `system_column`: where a system prompt may be.

    Raises:
        ValueError: it can't be used; the text names the column and the remedy.
    """
    if messages_column not in row:
        raise ValueError(f"no column {messages_column!r}; it has {', '.join(row)}. Name yours with --messages-column")
    where = f"column {messages_column!r}"
    messages = messages_of(list_of(row[messages_column], f"{where}: expected a list of messages"), where, images_column)
    messages = with_system(row, shown(row, messages, images_column, messages_column), system_column)
    return Conversation.of(number, messages, tools_of(row, tools_column))


def with_system(row: Row, messages: tuple[Message, ...], column: str | None) -> tuple[Message, ...]:
    """Return the messages after the system prompt in a column of the row, where it has one.

    Raises:
        ValueError: it is no text, or the messages have a system prompt of their own.
    """
    text = row.get(column) if column is not None else None
    if not text:
        return messages
    if not isinstance(text, str):
        raise ValueError(f"column {column!r}: expected a text, got {text!r:.60}")
    if messages[0]["role"] in ("system", "developer"):
        raise ValueError(f"column {column!r} has a system prompt and so have the messages: keep one of the two")
    return ({"role": "system", "content": text}, *messages)


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
            "conversations, set --trainer.vision to frozen or trained (and --media.images-column)"
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
    message = _as_openai(message, where)
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


def _as_openai(message: Any, where: str) -> Any:
    """Return a turn of ShareGPT (`from`, `value`) with the keys and roles of OpenAI's messages; others as they are."""
    if not isinstance(message, dict) or "role" in message or not {"from", "value"} <= message.keys():
        return message
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    who, value = message["from"], message["value"]
    if who == "function_call":
        calls = _json(value, f"{where}: a turn of 'function_call'") if isinstance(value, str) else value
        calls = calls if isinstance(calls, list) else [calls]
        return {"role": "assistant", "content": "", "tool_calls": calls, **others}
    role = SHAREGPT_ROLES.get(str(who))
    if role is None:
        raise ValueError(
            f"{where}: a turn needs a 'from' of {', '.join(SHAREGPT_ROLES)} or function_call, got {who!r:.60}"
        )
    return {"role": role, "content": value, **others}


def _check_parts(parts: Sequence[Any], where: str, sees: bool) -> None:
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind == "image" and sees:
            continue
        if kind != "text" or not isinstance(part.get("text"), str):
            hint = "" if sees else "; images are seen with --trainer.vision frozen or trained"
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

"""Images of a row put into its messages: from a column, at the places of image parts or <image> marks.

Data sets have them in three ways, and each is read: parts `{"type": "image", "image": PICTURE}`; parts `{"type":
"image"}` or the text <image> in a user's turn, and a column with the pictures in that order; that column alone, whose
pictures then come before the first user's turn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

IMAGE_MARK = "<image>"
Message = dict[str, Any]


def with_row_images(messages: Sequence[Message], images: Sequence[Any], column: str) -> tuple[Message, ...]:
    """Return the messages with every picture in a part of its own, as a path or a `data:` URI.

    Raises:
        ValueError: the column has another number of pictures than there are places, or one is no picture.
    """
    parts = [part for message in messages for part in _parts(message) if part.get("type") == "image"]
    bare = [part for part in parts if part.get("image") is None]
    marks = sum(_text(message).count(IMAGE_MARK) for message in messages)
    if images and len(bare) < len(parts):
        raise ValueError(f"column {column!r} has images and so have the messages: keep one of the two")
    if not images:
        if bare:
            raise ValueError(f"an image part has no 'image', and column {column!r} holds none")
        places = None
    elif bare or marks:
        places = len(bare) or marks
        if (bare and marks) or places != len(images):
            raise ValueError(f"column {column!r} has {len(images)} images for {places} places in the messages")
    else:
        places = 0
    waiting = [_picture(image, column) for image in images]
    out = []
    for message in messages:
        if places == 0 and message["role"] == "user" and waiting:
            message = {**message, "content": [*_image_parts(waiting), *_as_parts(message)]}
            waiting = []
        else:
            message = _filled(message, waiting, marked=bool(images) and not bare)
        out.append(message)
    if waiting:
        raise ValueError(f"column {column!r} has images, and no turn of a user that could show them")
    return tuple(out)


def _filled(message: Message, waiting: list[str], marked: bool) -> Message:
    """Return the message with images of `waiting` in its empty image parts or at its marks; they are taken off the
    front."""
    if marked and _text(message):
        first, *rest = _text(message).split(IMAGE_MARK)
        parts = _text_parts(first)
        for text in rest:
            parts += [*_image_parts([waiting.pop(0)]), *_text_parts(text)]
        return {**message, "content": parts} if rest else message
    if not any(part.get("type") == "image" for part in _parts(message)):
        return message
    filled = []
    for part in message["content"]:
        if part.get("type") == "image":
            image = part.get("image")
            filled += _image_parts([waiting.pop(0) if image is None else _picture(image, "content")])
        else:
            filled.append(part)
    return {**message, "content": filled}


def _picture(picture: Any, column: str) -> str:
    try:
        from engines.media.image_reader import as_text  # torch, which rows of text do without

        return as_text(picture)
    except ValueError as error:
        raise ValueError(f"{column}: {error}") from error


def _image_parts(image_processor: Sequence[str]) -> list[dict[str, Any]]:
    return [{"type": "image", "image": picture} for picture in image_processor]


def _text_parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text else []


def _as_parts(message: Message) -> list[dict[str, Any]]:
    content = message["content"]
    return _text_parts(content) if isinstance(content, str) else list(content)


def _parts(message: Message) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []


def _text(message: Message) -> str:
    """Return a user's plain text, in which marks are looked for."""
    content = message.get("content")
    return content if isinstance(content, str) and message["role"] == "user" else ""

"""Images in the messages of a conversation: from parts of a content to tokens and patches.

A part `{"type": "image", "image": PICTURE}` is an image; the chat template writes one placeholder token for it, which
becomes as many as the image has tokens. The caller brings the function that reads pictures (`ReadImages`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rollout.chat.messages import Message
from seqpack.batches.mrope import IMAGE, TEXT, grid_tokens

ReadImages = Callable[[Sequence[Any]], tuple[Tensor, Tensor]]
"""Function from pictures to patches f32[P, values] and grids i64[n, 3], as `engines.media.image_reader.ImageReader`."""


@dataclass(frozen=True)
class ImageProcessor:
    """How a model sees images: the function that cuts them into patches, and the placeholder token."""

    read: ReadImages
    numbers: int
    """Of a patch."""
    merge_size: int = 2
    token: str = "<|image_pad|>"
    measure: Callable[[Sequence[Any]], Tensor] | None = None
    """Function from pictures to their grids alone, which is cheaper; None where there is none."""

    def grids(self, images: Sequence[Any]) -> Tensor:
        """Return the grids i64[n, 3] of pictures."""
        return self.read(images)[1] if self.measure is None else self.measure(images)


@dataclass(frozen=True)
class RenderedPrompt:
    """The tokens with which a conversation begins, and their media (as for `RolloutEngine.generate`)."""

    ids: list[int]
    media: Mapping[str, Any] | None = None


def images_of(messages: Sequence[Message]) -> list[Any]:
    """Return the pictures of messages in order. Raise ValueError for an image part without one."""
    images = []
    for index, message in enumerate(messages):
        for part in _parts(message):
            if part.get("type") != "image":
                continue
            if part.get("image") is None:
                raise ValueError(f"message {index} ({message.get('role')}) has an image part without its 'image'")
            images.append(part["image"])
    return images


def without_images(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with empty image parts, as templates need them: without the pictures themselves."""
    return [
        {**m, "content": [{"type": "image"} if _is_image(part) else part for part in m["content"]]} if _parts(m) else m
        for m in messages
    ]


def without_image_parts(message: Message) -> Message:
    """Return a message without its image parts, so that any other media in it can be refused."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    return {**message, "content": [part for part in content if not _is_image(part)]}


def expanded(ids: Sequence[int], token: int, media: tuple[Tensor, Tensor], merge_size: int) -> RenderedPrompt:
    """Expand the placeholder token of each image to the image's tokens. Raise ValueError where counts differ."""
    patches, grids = media
    counts = [grid_tokens(grid, merge_size) for grid in grids.tolist()]
    if ids.count(token) != len(counts):
        raise ValueError(
            f"the chat template writes {ids.count(token)} image tokens for {len(counts)} images: it is not for them"
        )
    left, out, types = iter(counts), [], []
    for one in ids:
        count = next(left) if one == token else 1
        out += [one] * count
        types += [IMAGE if one == token else TEXT] * count
    return RenderedPrompt(out, {"pixel_values": patches, "image_grid_thw": grids, "mm_token_type_ids": types})


def _parts(message: Message) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list | tuple) else []


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"

"""Images, videos and audio in a conversation: how many tokens each takes, and of which type every token is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple

IMAGE, VIDEO, AUDIO = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Media:
    """All media of one type, in the order of the conversation.

    The template writes one `placeholder` for each; `expansions` says what takes its place: so many placeholders, or a
    text with placeholders in it (a video's frames between time stamps). `type_id` is what their tokens get in
    `mm_token_type_ids`: 1 image, 2 video, 3 audio, as in transformers.
    """

    placeholder: str
    expansions: Sequence[int | str]
    type_id: int = IMAGE


def images(counts: Sequence[int], placeholder: str = "<|image_pad|>") -> Media:
    """Return media of images with these numbers of tokens."""
    return Media(placeholder, counts, IMAGE)


def videos(expansions: Sequence[int | str], placeholder: str = "<|video_pad|>") -> Media:
    """Return media of videos, by their numbers of tokens or texts of frames between time stamps."""
    return Media(placeholder, expansions, VIDEO)


def grid_tokens(grid_thw: Sequence[int], merge_size: int = 2) -> int:
    """Return the tokens of a grid of patches (time, height, width), merge_size x merge_size patches a token."""
    time, height, width = grid_thw
    if height % merge_size or width % merge_size:
        raise ValueError(f"the grid {tuple(grid_thw)} is not divisible by merge_size={merge_size}")
    return int(time * (height // merge_size) * (width // merge_size))


class Expanded(NamedTuple):
    """A text with its media expanded, and how positions move: (old end, new end) of each expansion."""

    text: str
    moves: tuple[tuple[int, int], ...]

    def move(self, pos: int) -> int:
        """Return the position in the new text of a position in the old one, outside the placeholders."""
        shift = 0
        for old, new in self.moves:
            if pos < old:
                break
            shift = new - old
        return pos + shift


def expand(text: str, media: Sequence[Media]) -> Expanded:
    """Replace the placeholders by the expansions; ValueError if their numbers differ."""
    placed: list[tuple[int, Media, int | str]] = []
    for kind in media:
        count = text.count(kind.placeholder)
        if count != len(kind.expansions):
            raise ValueError(
                f"the conversation has {count} {kind.placeholder!r}, media describes "
                f"{len(kind.expansions)}: give one expansion for each, and keep the placeholder out of the texts"
            )
        at = -1
        for expansion in kind.expansions:
            at = text.index(kind.placeholder, at + 1)
            placed.append((at, kind, expansion))
    parts: list[str] = []
    moves: list[tuple[int, int]] = []
    old = new = 0
    for at, kind, expansion in sorted(placed, key=lambda item: item[0]):
        piece = expansion if isinstance(expansion, str) else kind.placeholder * index(expansion)  # numpy's too
        parts += [text[old:at], piece]
        new += at - old + len(piece)
        old = at + len(kind.placeholder)
        moves.append((old, new))
    return Expanded("".join([*parts, text[old:]]), tuple(moves))


def token_types(tokenizer: Any, ids: Sequence[int], media: Sequence[Media]) -> list[int]:
    """Return the type of each token: 0 for text, else the type_id of the media whose placeholder it is."""
    types: dict[int, int] = {}
    for kind in media:
        own = tokenizer(kind.placeholder, add_special_tokens=False)["input_ids"]
        if len(own) != 1:
            raise ValueError(
                f"the placeholder {kind.placeholder!r} is {len(own)} tokens; it has to be one of the tokenizer's"
            )
        types[own[0]] = kind.type_id
    return [types.get(i, 0) for i in ids]

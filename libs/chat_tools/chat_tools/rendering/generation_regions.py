"""The regions that are trained where a template marks what the assistant writes (`{% generation %}`)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import starmap
from operator import eq, itemgetter

from chat_tools.rendering.masks import Region, Regions
from chat_tools.rendering.replaced_messages import MessageSpan
from chat_tools.rendering.template import Message

_start, _end = itemgetter(0), itemgetter(1)


def block_mask(blocks: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return `apply_chat_template`'s mask: 1 for each token of the blocks `start:end` that a template marks.

    A block's tokens are those from its first character's first one to its last character's first one. (Before 5.24
    transformers marks all that follows, where the block is the very first token.)
    """
    mask = [0] * len(offsets)
    starts = list(map(_start, offsets))
    for start, end in blocks:
        first, last = _token_of(start, offsets, starts), _token_of(end - 1, offsets, starts)
        if first is None:
            break
        stop = len(mask) if last is None else last + 1
        mask[first:stop] = [1] * (stop - first)
    return mask


def _token_of(position: int, offsets: Sequence[tuple[int, int]], starts: Sequence[int]) -> int | None:
    """Return the first token that holds a character, None if none does."""
    at = bisect_right(starts, position) - 1
    while at > 0 and offsets[at - 1][1] > position:
        at -= 1
    return at if at >= 0 and offsets[at][0] <= position < offsets[at][1] else None


def trained_regions(
    turns: Regions,
    marked: list[int] | None,
    offsets: Sequence[tuple[int, int]],
    messages: Sequence[Message],
    problems: list[str],
) -> list[Region]:
    """Return the proven regions, cut to the template's own marks where it has some."""
    if marked is not None and len(marked) == len(offsets):
        return _regions_of_marks(marked, offsets, turns, messages, problems)
    problems += turns.problems
    return turns.regions


def _regions_of_marks(
    mask: list[int],
    offsets: Sequence[tuple[int, int]],
    turns: Regions,
    messages: Sequence[Message],
    problems: list[str],
) -> list[Region]:
    """Return the marked regions within the assistant's turns: marks can leave out characters, and add none.

    Of marked tokens those inside a proven turn are trained; a turn that could not be proven is not. Where the model's
    stop tokens were given, the whole end of a turn is trained even if the marks end before it or within.
    """
    problems += turns.problems
    proven = {region.message for region in turns.regions}
    foreign = [p for p in turns.owners.pieces if messages[p.message].get("role") != "assistant"]
    foreign_ends = [piece.end for piece in foreign]
    ends_of_proven = [region.end for region in turns.regions]
    regions: list[Region] = []
    for tokens in filter(None, _runs(mask, offsets)):
        taken = [p.message for p in _overlapping(foreign, foreign_ends, tokens[0][0], tokens[-1][1])]
        problems += [f"message {m}: the template marks what the {messages[m].get('role')} wrote" for m in taken]
        regions += _inside(tokens, turns.regions, ends_of_proven)
    if turns.stops_known:
        ends = {at: region.end for region in turns.regions for at in range(region.body_end, region.end)}
        regions = [r._replace(end=ends.get(r.end, r.end)) for r in regions]
    unmarked = proven - {region.message for region in regions}
    problems += [f"message {i}: the template marks nothing of it" for i in sorted(unmarked)]
    return regions


def _inside(tokens: Sequence[tuple[int, int]], regions: Sequence[Region], ends: Sequence[int]) -> list[Region]:
    """Return the parts of regions (whose ends are `ends`) that a run of tokens touches."""
    parts: list[Region] = []
    at = bisect_right(ends, tokens[0][0])
    while at < len(regions) and regions[at].start < tokens[-1][1]:
        region = regions[at]
        first = bisect_right(tokens, region.start, key=_end)
        last = bisect_left(tokens, region.end, key=_start) - 1
        start, end = max(tokens[first][0], region.start), min(tokens[last][1], region.end)
        parts.append(Region(region.message, start, end, end))
        at += 1
    return parts


def _overlapping(pieces: Sequence[MessageSpan], ends: Sequence[int], start: int, end: int) -> list[MessageSpan]:
    """Return the pieces (in order, without overlaps, with these `ends`) that hold a character of `start:end`."""
    at = bisect_right(ends, start)
    overlapping = []
    while at < len(pieces) and pieces[at].start < end:
        overlapping.append(pieces[at])
        at += 1
    return overlapping


def _runs(mask: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return the characters of each run of marked tokens, without tokens of no character.

    All tokens of a character whose first token is marked belong to its run: transformers' mask ends with the first.
    """
    runs: list[list[tuple[int, int]]] = []
    begin = _next(mask, True, 0)
    while begin < len(mask):
        end = _next(mask, False, begin)
        while end < len(mask) and (
            mask[end] or (offsets[end] == offsets[end - 1] and offsets[end][0] < offsets[end][1])
        ):
            end += 1
        run = offsets[begin:end]
        runs.append([token for token in run if token[0] < token[1]] if any(starmap(eq, run)) else list(run))
        begin = _next(mask, True, end)
    return runs


def _next(mask: Sequence[int], value: bool, start: int) -> int:
    """Return the next position of the value, or the length."""
    try:
        return mask.index(value, start)
    except ValueError:
        return len(mask)

"""The regions that are trained where a template marks what the assistant writes (`{% generation %}`)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import eq

from chat_tools.rendering.masks import Region, Regions
from chat_tools.rendering.replaced_messages import MessageSpan
from chat_tools.rendering.template import Message
from chat_tools.rendering.token_places import Offsets


def block_mask(blocks: Sequence[tuple[int, int]], offsets: Offsets) -> list[int]:
    """Return `apply_chat_template`'s mask: 1 for each token of the blocks `start:end` that a template marks.

    A block's tokens are those from its first character's first one to its last character's first one. (Before 5.24
    transformers marks all that follows, where the block is the very first token.)
    """
    mask = [0] * len(offsets.starts)
    for start, end in blocks:
        first, last = _token_of(start, offsets), _token_of(end - 1, offsets)
        if first is None:
            break
        stop = len(mask) if last is None else last + 1
        mask[first:stop] = [1] * (stop - first)
    return mask


def marks_are(regions: Sequence[Region], blocks: Sequence[tuple[int, int]], offsets: Offsets) -> bool:
    """Return whether the marked blocks are the regions, from whole token to whole token: they leave nothing out."""
    return blocks == [(region.start, region.end) for region in regions] and all(
        (first := _token_of(start, offsets)) is not None
        and offsets.starts[first] == start
        and offsets.ends[bisect_left(offsets.ends, end)] == end
        for start, end in blocks
    )


def _token_of(position: int, offsets: Offsets) -> int | None:
    """Return the first token that holds a character, None if none does."""
    starts, ends = offsets
    at = bisect_right(starts, position) - 1
    while at > 0 and ends[at - 1] > position:
        at -= 1
    return at if at >= 0 and starts[at] <= position < ends[at] else None


def trained_regions(
    turns: Regions,
    marked: list[int] | None,
    offsets: Offsets,
    messages: Sequence[Message],
    problems: list[str],
) -> list[Region]:
    """Return the proven regions, cut to the template's own marks where it has some."""
    if marked is not None and len(marked) == len(offsets.starts):
        return _regions_of_marks(marked, offsets, turns, messages, problems)
    problems += turns.problems
    return turns.regions


def _regions_of_marks(
    mask: list[int],
    offsets: Offsets,
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
    for tokens in _runs(mask, offsets):
        taken = [p.message for p in _overlapping(foreign, foreign_ends, tokens.starts[0], tokens.ends[-1])]
        problems += [f"message {m}: the template marks what the {messages[m].get('role')} wrote" for m in taken]
        regions += _inside(tokens, turns.regions, ends_of_proven)
    if turns.stops_known:
        ends = {at: region.end for region in turns.regions for at in range(region.body_end, region.end)}
        regions = [r._replace(end=ends.get(r.end, r.end)) for r in regions]
    unmarked = proven - {region.message for region in regions}
    problems += [f"message {i}: the template marks nothing of it" for i in sorted(unmarked)]
    return regions


def _inside(tokens: Offsets, regions: Sequence[Region], ends: Sequence[int]) -> list[Region]:
    """Return the parts of regions (whose ends are `ends`) that a run of tokens touches."""
    parts: list[Region] = []
    at = bisect_right(ends, tokens.starts[0])
    while at < len(regions) and regions[at].start < tokens.ends[-1]:
        region = regions[at]
        first = bisect_right(tokens.ends, region.start)
        last = bisect_left(tokens.starts, region.end) - 1
        start, end = max(tokens.starts[first], region.start), min(tokens.ends[last], region.end)
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


def _runs(mask: Sequence[int], offsets: Offsets) -> list[Offsets]:
    """Return the characters of each run of marked tokens, without tokens of no character.

    All tokens of a character whose first token is marked belong to its run: transformers' mask ends with the first.
    """
    runs: list[Offsets] = []
    starts, ends = offsets
    begin = _next(mask, True, 0)
    while begin < len(mask):
        end = _next(mask, False, begin)
        while end < len(mask) and (
            mask[end] or (starts[end] == starts[end - 1] and ends[end] == ends[end - 1] > starts[end])
        ):
            end += 1
        run = Offsets(starts[begin:end], ends[begin:end])
        if any(map(eq, *run)):
            run = Offsets.of([pair for pair in zip(*run, strict=True) if pair[0] < pair[1]])
        if run.starts:
            runs.append(run)
        begin = _next(mask, True, end)
    return runs


def _next(mask: Sequence[int], value: bool, start: int) -> int:
    """Return the next position of the value, or the length."""
    try:
        return mask.index(value, start)
    except ValueError:
        return len(mask)

"""A training batch of the rows that a rank holds, and the outline of all rows, which every rank can make.

With them a rank has the rows of `to_batch` that it trains, to the bit, without any other row's tokens.
"""

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from rollout.chat.segment import NOT_SAMPLED
from rollout.episodes.batch import TYPES
from rollout.episodes.rows import IDS, LISTED, LOG_PROBS, MEDIA, media_of, tokens_from_spans
from rollout.episodes.summary import AnyEpisode, EpisodeSummary, SegmentSummary
from rollout.experts import ROUTED_EXPERTS, UNKNOWN
from seqpack import index_select
from seqpack.batches.batch import check_batch
from seqpack.batches.dicts import share_offsets
from seqpack.batches.jagged import jagged, jagged_from_values
from seqpack.comm.row_exchange import Column


def row_places(episodes: Sequence[AnyEpisode]) -> list[tuple[int, int]]:
    """Return the episode and the segment of each row of a batch, in the order of `to_batch`."""
    scored = [(place, episode) for place, episode in enumerate(episodes) if episode.score is not None]
    return [(place, number) for place, episode in scored for number in range(len(episode.segments))]


def row_outline(episodes: Sequence[AnyEpisode]) -> TensorDict:
    """Return the columns of `to_batch` that need no token: jagged `loss_mask`; `reward`, `group`, `episode` and
    `episode_tokens`. Raises ValueError when no row is left."""
    places = row_places(episodes)
    if not places:
        raise ValueError(f"none of {len(episodes)} episodes can be trained on; a batch needs at least one")
    spans = [episodes[episode].segments[segment].spans for episode, segment in places]
    masks = [tokens_from_spans(of_row) != NOT_SAMPLED for of_row in spans]
    columns = {
        "loss_mask": jagged_from_values(torch.cat(masks), [len(mask) for mask in masks]),
        "reward": torch.tensor([episodes[place].reward for place, _ in places], dtype=torch.float32),
        "group": torch.tensor([episodes[place].group for place, _ in places]),
        "episode": torch.tensor([place for place, _ in places]),
        "episode_tokens": torch.tensor([episodes[place].sampled for place, _ in places]),
    }
    return TensorDict(columns, batch_size=[len(places)])


def rows_to_batch(
    episodes: Sequence[EpisodeSummary],
    outline: TensorDict,
    rows: Sequence[int],
    tensors: Mapping[int, Mapping[str, Tensor]],
) -> TensorDict:
    """Return the batch of some rows: those of the outline, whose columns it keeps, with tokens, log-probs, positions
    and policy versions, and experts and media where any row of any rank has some.

    `tensors`: the row's own (`rollout.episodes.rows`), by its number; at least one row is asked for.
    """
    places = row_places(episodes)
    summaries = [episodes[place].segments[number] for place, number in places]
    own = [summaries[row] for row in rows]
    lengths = [summary.length for summary in own]

    def column(entries: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return jagged_from_values(torch.cat([entry.to(dtype) for entry in entries]), lengths)

    columns = {
        **{key: value for key, value in index_select(outline, list(rows)).items()},  # noqa: C416  a TensorDict's
        "input_ids": column([tensors[row][IDS] for row in rows], torch.int64),
        "position_ids": column([torch.arange(length) for length in lengths], torch.int64),
        "rollout_log_probs": column([tensors[row][LOG_PROBS] for row in rows], torch.float32),
        "policy_version": column([tokens_from_spans(summary.spans) for summary in own], torch.int32),
    }
    beside = _experts(summaries, rows, tensors) | _media(summaries, rows, tensors)
    columns |= {key: jagged(values, 0) for key, values in beside.items()}
    batch = TensorDict(share_offsets(columns), batch_size=[len(rows)])
    check_batch(batch)
    return batch


def _columns(summaries: Sequence[SegmentSummary]) -> dict[str, Column]:
    """Return a column of each name that any row has."""
    return {column.name: column for summary in summaries for column in summary.columns}


def _experts(
    summaries: Sequence[SegmentSummary], rows: Sequence[int], tensors: Mapping[int, Mapping[str, Tensor]]
) -> dict[str, list[Tensor]]:
    """Return i16[tokens, layers, k] of each row, {} where no row has any. Raise ValueError for rows of two models."""
    shapes = {c.shape[1:] for s in summaries for c in s.columns if c.name == ROUTED_EXPERTS}
    if not shapes:
        return {}
    if len(shapes) > 1:
        raise ValueError("the episodes were sampled from models of different experts")
    shape = shapes.pop()

    def of_row(row: int) -> Tensor:
        unknown = torch.full((summaries[row].length, *shape), UNKNOWN, dtype=torch.int16)
        return tensors[row].get(ROUTED_EXPERTS, unknown)

    return {ROUTED_EXPERTS: [of_row(row) for row in rows]}


def _media(
    summaries: Sequence[SegmentSummary], rows: Sequence[int], tensors: Mapping[int, Mapping[str, Tensor]]
) -> dict[str, list[Tensor]]:
    """Return the media of the rows by key, an empty tensor for a row without a kind; {} where no row has any."""
    named = {
        name.removeprefix(prefix): column
        for name, column in _columns(summaries).items()
        for prefix in (MEDIA, LISTED)
        if name.startswith(prefix)
    }
    kinds = {key: column for key, column in named.items() if key != TYPES}
    if not kinds:
        return {}
    shown = [media_of(tensors[row]) for row in rows]
    empty = {key: torch.zeros(0, *column.shape[1:], dtype=column.dtype) for key, column in kinds.items()}
    columns = {key: [media.get(key, none) for media in shown] for key, none in empty.items()}

    def types(media: Mapping[str, Tensor], row: int) -> Tensor:
        own = media.get(TYPES, torch.zeros(0)).to(torch.int64)
        return torch.cat([own, own.new_zeros(summaries[row].length - len(own))])

    return {**columns, TYPES: [types(media, row) for media, row in zip(shown, rows, strict=True)]}

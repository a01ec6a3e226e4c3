"""Episodes as a training batch."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rollout.chat.segment import Segment
from rollout.episodes.episode import Episode
from rollout.experts import ROUTED_EXPERTS, RoutedExperts
from seqpack.batches.batch import check_batch
from seqpack.batches.dicts import share_offsets
from seqpack.batches.jagged import jagged, jagged_from_values

TYPES = "mm_token_type_ids"


def to_batch(episodes: Sequence[Episode]) -> TensorDict:
    """Return the training batch of the episodes that did not fail, one row a segment.

    Jagged `input_ids`, `position_ids`, `loss_mask`, `rollout_log_probs`, `policy_version`, all (B, j) and aligned;
    `reward` (B,) float32 and `group` (B,) int64, the episode's own in each of its rows; `episode` (B,) int64, the
    episode's index in `episodes`, by which a group counts an episode of several rows once; `episode_tokens` (B,) int64,
    the number of tokens sampled in the whole episode, for means over episodes. Raises ValueError when no row is left.

    Where an engine returned routed experts, `routed_experts` (B, j, layers, k) int16, -1 where unknown. Where an
    episode shows images, every row has `pixel_values`, `image_grid_thw` (none of a row of text) and
    `mm_token_type_ids`; videos likewise.
    """
    scored = [(place, episode) for place, episode in enumerate(episodes) if episode.score is not None]
    rows = [(place, episode, segment) for place, episode in scored for segment in episode.segments]
    if not rows:
        why = next((f", the first for: {e.error}" for e in episodes if e.error is not None), "")
        raise ValueError(f"none of {len(episodes)} episodes can be trained on{why}; a batch needs at least one")
    segments = [segment for _, _, segment in rows]
    lengths = [len(segment.ids) for segment in segments]

    def column(entries: Iterable[Sequence[float]], dtype: torch.dtype) -> Tensor:
        """Return a column (B, j) from one tensor of all rows: a tensor made for each costs ten times as much."""
        return jagged_from_values(torch.tensor(list(chain.from_iterable(entries)), dtype=dtype), lengths)

    columns: dict[str, Tensor] = {
        "input_ids": column((s.ids for s in segments), torch.int64),
        "position_ids": column(map(range, lengths), torch.int64),
        "loss_mask": column((s.loss_mask for s in segments), torch.bool),
        "rollout_log_probs": column((s.log_probs for s in segments), torch.float32),
        "policy_version": column((s.policy_versions for s in segments), torch.int32),
        "reward": torch.tensor([episode.reward for _, episode, _ in rows], dtype=torch.float32),
        "group": torch.tensor([episode.group for _, episode, _ in rows]),
        "episode": torch.tensor([place for place, _, _ in rows]),
        "episode_tokens": torch.tensor([episode.sampled for _, episode, _ in rows]),
        **{key: jagged(values, 0) for key, values in (_experts(segments) | _media(segments)).items()},
    }
    batch = TensorDict(share_offsets(columns), batch_size=[len(rows)])
    check_batch(batch)
    return batch


def _experts(segments: Sequence[Segment]) -> dict[str, list[Tensor]]:
    """Return i16[tokens, layers, k] of each row, {} where no row has any. Raise ValueError for rows of two models."""
    known = [s.routed_experts for s in segments if s.routed_experts is not None]
    if not known:
        return {}
    if len({(experts.layers, experts.k) for experts in known}) > 1:
        raise ValueError("the episodes were sampled from models of different experts")
    nothing = RoutedExperts(known[0].layers, known[0].k, b"")
    rows = [nothing if s.routed_experts is None else s.routed_experts for s in segments]
    return {ROUTED_EXPERTS: [row.resized(len(s.ids)).tensor() for row, s in zip(rows, segments, strict=True)]}


def _media(segments: Sequence[Segment]) -> dict[str, list[Tensor]]:
    """Return the media of all rows by key, an empty tensor for a row without a kind; {} where no row has any."""
    shown = [segment.media or {} for segment in segments]
    empty = {key: torch.as_tensor(value)[:0] for media in shown for key, value in media.items() if key != TYPES}
    if not empty:
        return {}
    columns = {key: [torch.as_tensor(media.get(key, none)) for media in shown] for key, none in empty.items()}
    return {**columns, TYPES: [_types(s, media) for s, media in zip(segments, shown, strict=True)]}


def _types(segment: Segment, media: Mapping[str, Any]) -> Tensor:
    """Return the token types i64[tokens] of a row: those given for the prompt, then text."""
    own = torch.as_tensor(media.get(TYPES, ()), dtype=torch.int64)
    return torch.cat([own, own.new_zeros(len(segment.ids) - len(own))])

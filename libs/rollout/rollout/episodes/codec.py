"""Episodes as bytes, for a ledger and between processes: JSON, exact to the bit of every log-prob."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rollout.chat.images import without_images
from rollout.chat.segment import Segment
from rollout.environments.environment import Score
from rollout.episodes.episode import Episode
from rollout.episodes.media_codec import plain_media, read_media
from rollout.experts import RoutedExperts


def encode_episodes(episodes: Sequence[Episode]) -> bytes:
    """Encode episodes. Raise ValueError for media that are no tensors, and messages that JSON cannot write.

    Pictures in messages are left out of their image parts: what the model saw of them is in the segments' media.
    """
    return json.dumps([_plain(episode) for episode in episodes], ensure_ascii=False, separators=(",", ":")).encode()


def decode_episodes(data: bytes) -> list[Episode]:
    """Decode the bytes of `encode_episodes`; messages have JSON's types."""
    return [_episode(row) for row in json.loads(data)]


def _plain(episode: Episode) -> dict[str, Any]:
    row = {name: getattr(episode, name) for name in episode.__dataclass_fields__}
    row["segments"] = [
        [
            s.ids,
            [int(on) for on in s.loss_mask],
            s.log_probs,
            s.policy_versions,
            s.agent,
            None if s.routed_experts is None else s.routed_experts.plain(),
            None if s.media is None else plain_media(s.media),
        ]
        for s in episode.segments
    ]
    row["score"] = None if episode.score is None else asdict(episode.score)
    row["messages"] = [dict(message) for message in without_images(episode.messages)]
    return row | {"timings": dict(episode.timings), "metrics": dict(episode.metrics)}


def _episode(row: dict[str, Any]) -> Episode:
    segments = tuple(_segment(*entries) for entries in row["segments"])
    score = None if row["score"] is None else Score(**row["score"])
    return Episode(**{**row, "segments": segments, "score": score, "messages": tuple(row["messages"])})


def _segment(
    ids: list[int],
    mask: list[int],
    log_probs: list[float],
    versions: list[int],
    agent: str,
    experts: list[Any] | None = None,
    media: dict[str, Any] | None = None,
) -> Segment:
    """Return a segment from its record; older records lack `experts` and `media`."""
    streams = (tuple(ids), tuple(map(bool, mask)), tuple(log_probs), tuple(versions))
    routed = None if experts is None else RoutedExperts.read(experts)
    shown = None if media is None else read_media(media)
    return Segment(*streams, media=shown, agent=agent, routed_experts=routed)

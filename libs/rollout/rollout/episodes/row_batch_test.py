"""Rows that travel: an episode comes back from its summary and its bytes, and batches of rows are `to_batch`'s own."""

import dataclasses

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rollout.chat.segment import Segment
from rollout.environments.environment import Score
from rollout.episodes.batch import to_batch
from rollout.episodes.episode import Episode
from rollout.episodes.row_batch import row_outline, row_places, rows_to_batch
from rollout.episodes.rows import flatten_episode, read_episode, row_columns
from rollout.episodes.summary import EpisodeSummary, decode_summaries, encode_summaries, summarize
from rollout.experts import RoutedExperts
from seqpack import index_select
from seqpack.comm.row_exchange import flatten_row, unflatten_row

numbers = st.floats(-1e38, 1e38)
log_probs = st.floats(-50, 0, width=32) | st.floats(-50, 0)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    mask = (False, *draw(st.lists(st.booleans(), max_size=8)))
    count = len(mask)
    media = None
    if draw(st.booleans()):
        patches = draw(st.integers(0, 3))
        types = draw(st.lists(st.integers(0, 1), max_size=count))
        media = {
            "pixel_values": torch.arange(4.0 * patches).view(patches, 4),
            "image_grid_thw": torch.ones(min(patches, 1), 3, dtype=torch.int64),
            "mm_token_type_ids": types if draw(st.booleans()) else torch.tensor(types, dtype=torch.int64),
        }
    experts = RoutedExperts.of(torch.arange(count * 4).view(count, 2, 2)) if draw(st.booleans()) else None
    return Segment(
        tuple(draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count))),
        mask,
        tuple(draw(log_probs) if on else 0.0 for on in mask),
        tuple(draw(st.integers(0, 2)) if on else -1 for on in mask),
        media=media,
        agent=draw(st.sampled_from(["", "sub"])),
        routed_experts=experts,
    )


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    failed = draw(st.integers(0, 3)) == 0
    score = Score(draw(numbers), {"part": draw(numbers)}, draw(st.lists(numbers, max_size=2)))
    return Episode(
        id=draw(st.text(max_size=4)),
        task_id=draw(st.text(max_size=4)),
        attempt=draw(st.integers(0, 3)),
        segments=tuple(draw(st.lists(segments(), max_size=3))),
        score=None if failed else score,
        end="failed" if failed else "done",
        timings={"total_s": draw(numbers)},
        error="broke" if failed else None,
        messages=({"role": "user", "content": draw(st.text(max_size=4))},),
        metrics={"turns": draw(numbers)},
        group=draw(st.integers(0, 3)),
    )


def same(one: Episode, other: Episode) -> bool:
    """Tensors are compared by value, and everything else by ==."""
    for left, right in zip(one.segments, other.segments, strict=True):
        ours, theirs = left.media or {}, right.media or {}
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert type(value) is type(theirs[key])
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[key]))
    return _without_media(one) == _without_media(other)


def _without_media(episode: Episode) -> Episode:
    return dataclasses.replace(
        episode, segments=tuple(dataclasses.replace(segment, media=None) for segment in episode.segments)
    )


def travelled(given_: list[Episode]) -> list[EpisodeSummary]:
    """Their summaries, as another rank gets them."""
    return decode_summaries(encode_summaries([summarize(episode, 0) for episode in given_]))


@settings(deadline=None)
@given(st.lists(episodes(), max_size=3))
def test_an_episode_comes_back_from_its_summary_and_its_bytes(given_: list[Episode]) -> None:
    for episode, summary in zip(given_, travelled(given_), strict=True):
        assert summary == summarize(episode, 0)
        flat = flatten_episode(summarize(episode, 0))
        assert len(flat) == summary.nbytes
        assert same(read_episode(summary, flat), episode)


@settings(deadline=None)
@given(st.lists(episodes(), min_size=1, max_size=4), st.data())
def test_a_batch_of_rows_is_that_of_the_whole_batch(given_: list[Episode], data: st.DataObject) -> None:
    places = row_places(given_)
    assume(places)
    whole, summaries = to_batch(given_), travelled(given_)
    assert row_places(summaries) == places
    outline = row_outline(summaries)
    for key, column in row_outline(given_).items():
        assert torch.equal(column.values() if column.is_nested else column, _flat(outline[key]))
        assert torch.equal(_flat(outline[key]), _flat(whole[key]))
    rows = data.draw(st.lists(st.integers(0, len(places) - 1), min_size=1, unique=True))
    tensors = {}
    for row in rows:
        episode, segment = places[row]
        flat = flatten_row(row_columns(given_[episode].segments[segment]))
        tensors[row] = unflatten_row(flat, summaries[episode].segments[segment].columns)
    batch, expected = rows_to_batch(summaries, outline, rows, tensors), index_select(whole, rows)
    assert set(batch.keys()) == set(expected.keys())
    for key in expected.keys():  # noqa: SIM118  a TensorDict iterates over its samples
        assert batch[key].dtype == expected[key].dtype, key
        for ours, theirs in zip(batch[key].unbind(), expected[key].unbind(), strict=True):
            assert torch.equal(ours, theirs), key


def _flat(column: torch.Tensor) -> torch.Tensor:
    return column.values() if column.is_nested else column


@given(segments())
def test_a_summary_counts_what_the_segment_does(segment: Segment) -> None:
    episode = Episode("a", "a", 0, (segment,), Score(1.0), "done")
    (summary,) = travelled([episode])[0].segments
    for name in ("length", "sampled", "spans", "nll", "policy_versions", "agent"):
        assert getattr(summary, name) == getattr(segment, name), name


def test_summaries_do_not_grow_with_the_tokens() -> None:
    """A row of 32,768 tokens is 262,144 bytes, and what all ranks know of it a few hundred, or less."""

    def of_length(count: int) -> Episode:
        mask = (False,) * 4 + (True,) * (count - 4)
        stream = Segment((7,) * count, mask, (0.0,) * 4 + (-1.5,) * (count - 4), (-1,) * 4 + (3,) * (count - 4))
        return Episode("task/0/0", "task", 0, (stream,), Score(1.0), "done", metrics={"turns": 1.0})

    long = [of_length(2**15) for _ in range(64)]
    assert sum(segment.nbytes for segment in summarize(long[0], 0).segments) == 2**18
    assert len(encode_summaries([summarize(episode, 0) for episode in long])) < 64 * 300


def test_a_message_that_json_lacks_is_refused() -> None:
    episode = Episode("a", "a", 0, (), Score(1.0), "done", messages=({"role": "user", "content": object()},))
    with pytest.raises(ValueError, match="episode a has a message that JSON cannot write"):
        summarize(episode, 0)

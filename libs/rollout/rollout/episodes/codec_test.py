"""Episodes come back as they went, to the bit."""

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.chat.messages import Message
from rollout.chat.segment import Segment
from rollout.environments.environment import Score
from rollout.episodes.codec import decode_episodes, encode_episodes
from rollout.episodes.episode import Episode
from rollout.episodes.media_codec import DTYPES, plain_media, read_media

floats = st.floats(allow_nan=False, allow_infinity=False)
rewards = st.floats(-1e38, 1e38)
"""Of a score: what float32 holds."""
texts = st.text(max_size=8)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    given_, sampled = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    mask = (False,) * given_ + (True,) * sampled
    return Segment(
        tuple(draw(st.lists(st.integers(0, 10**6), min_size=len(mask), max_size=len(mask)))),
        mask,
        tuple(draw(floats) if on else 0.0 for on in mask),
        tuple(draw(st.integers(0, 99)) if on else -1 for on in mask),
        agent=draw(texts),
    )


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    failed = draw(st.booleans())
    return Episode(
        id=draw(texts),
        task_id=draw(texts),
        attempt=draw(st.integers(0, 3)),
        segments=tuple(draw(st.lists(segments(), max_size=3))),
        score=None
        if failed
        else Score(
            draw(rewards), draw(st.dictionaries(texts, rewards, max_size=2)), draw(st.lists(rewards, max_size=3))
        ),
        end="failed" if failed else draw(st.sampled_from(["done", "length", "deadline"])),
        timings=draw(st.dictionaries(texts, floats, max_size=2)),
        error="broke" if failed else None,
        messages=tuple(draw(st.lists(st.dictionaries(texts, texts, max_size=2), max_size=2))),
        metrics=draw(st.dictionaries(texts, floats, max_size=2)),
        group=draw(st.integers(0, 10**9)),
    )


@given(st.lists(episodes(), max_size=3))
def test_a_round_trip_changes_nothing(given_: list[Episode]) -> None:
    assert decode_episodes(encode_episodes(given_)) == given_


def showing(media: Mapping[str, Any] | None, messages: tuple[Message, ...] = ()) -> Episode:
    held = Segment((1,), (False,), (0.0,), (-1,), media=media)
    return Episode("a", "a", 0, (held,), Score(math.pi), "done", messages=messages)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_media_come_back_to_the_bit(dtype: torch.dtype) -> None:
    """Any bytes, NaN of any payload among them; strided, empty and without dimensions."""
    raw = torch.randint(0, 256, (6, 4 * dtype.itemsize), dtype=torch.uint8, generator=torch.manual_seed(0))
    whole = raw % 2 == 1 if dtype is torch.bool else raw.view(dtype)
    media = {"pixel_values": whole, "strided": whole.T, "none": whole[:0], "one": whole[0, 0]}
    (back,) = decode_episodes(encode_episodes([showing({**media, "types": [0, 1, 1]})]))
    found = back.segments[0].media or {}
    assert list(found) == [*media, "types"]
    assert found["types"] == [0, 1, 1]
    for name, tensor in media.items():
        assert (found[name].dtype, found[name].shape) == (dtype, tensor.shape)
        both = (one.contiguous().reshape(-1).view(torch.uint8) for one in (found[name], tensor))
        assert torch.equal(*both)


def test_pictures_are_left_out_of_messages() -> None:
    parts = [{"type": "image", "image": object()}, {"type": "text", "text": "what is it?"}]
    given_ = showing(None, ({"role": "user", "content": parts}, {"role": "assistant", "content": "a cat"}))
    (back,) = decode_episodes(encode_episodes([given_]))
    assert back.messages == (
        {"role": "user", "content": [{"type": "image"}, parts[1]]},
        {"role": "assistant", "content": "a cat"},
    )
    assert back.segments[0].media is None


def test_media_that_are_no_tensors_are_refused() -> None:
    for value, says in (
        (object(), "a object"),
        ([0.5], "a list"),
        (torch.zeros(1, dtype=torch.complex64), "complex64"),
    ):
        with pytest.raises(ValueError, match=f"media 'pixel_values' are .*{says.split()[-1]}"):
            encode_episodes([showing({"pixel_values": value})])


def test_bytes_of_another_shape_are_refused() -> None:
    plain = plain_media({"pixel_values": torch.zeros(2, 3)})
    plain["pixel_values"]["shape"] = [2, 4]
    with pytest.raises(ValueError, match=r"24 bytes are no float32 of shape \[2, 4\]"):
        read_media(plain)


def test_what_was_written_before_media_were_kept_is_read() -> None:
    row = json.loads(encode_episodes([showing(None)]))
    row[0]["segments"] = [segment[:5] for segment in row[0]["segments"]]
    assert decode_episodes(json.dumps(row).encode()) == [showing(None)]

"""Episodes come back as they went, to the bit."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.environments.environment import Score
from rollout.episodes.codec import decode_episodes, encode_episodes
from rollout.episodes.episode import Episode
from rollout.episodes.segment import Segment

floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(max_size=8)


@st.composite
def segments(draw):
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
def episodes(draw):
    failed = draw(st.booleans())
    return Episode(
        id=draw(texts),
        task_id=draw(texts),
        attempt=draw(st.integers(0, 3)),
        segments=tuple(draw(st.lists(segments(), max_size=3))),
        score=None if failed else Score(draw(floats), draw(st.dictionaries(texts, floats, max_size=2))),
        end="failed" if failed else draw(st.sampled_from(["done", "length", "deadline"])),
        timings=draw(st.dictionaries(texts, floats, max_size=2)),
        error="broke" if failed else None,
        messages=tuple(draw(st.lists(st.dictionaries(texts, texts, max_size=2), max_size=2))),
        metrics=draw(st.dictionaries(texts, floats, max_size=2)),
        group=draw(st.integers(0, 10**9)),
    )


@given(st.lists(episodes(), max_size=3))
def test_a_round_trip_changes_nothing(given_):
    assert decode_episodes(encode_episodes(given_)) == given_


def test_media_is_refused():
    held = Segment((1,), (False,), (0.0,), (-1,), media={"pixel_values": 1})
    with pytest.raises(ValueError, match="holds media"):
        encode_episodes([Episode("a", "a", 0, (held,), Score(math.pi), "done")])

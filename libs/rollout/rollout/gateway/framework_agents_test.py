"""Quickstart agents of frameworks, unmodified, train token-exact: every sampled token once, with stock's log-prob."""

from pathlib import Path

import pytest

from rollout.testing.quickstarts import QUICKSTARTS, play


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:agents send:RuntimeWarning")
@pytest.mark.parametrize("name", [name for name in QUICKSTARTS if name != "litellm"])
def test_it_trains_token_exact(name: str, tmp_path: Path) -> None:
    played = play(name, tmp_path)
    assert [e.score and e.score.reward for e in played.episodes] == [1.0] * 2, [e.error for e in played.episodes]
    turns = 1 if name == "smolagents" else 2  # the tool is called in the first, by code where that is the agent's way
    assert played.requests == 2 * turns
    after_stop = 2 if name == "smolagents" else 0  # its stop text ends the answer one token before the turn
    assert played.sampled - after_stop == played.trained > 50
    assert all(len(episode.segments) == 1 for episode in played.episodes)
    assert played.difference < 1e-5

"""litellm's page of function calling, unmodified, trains token-exact; it wants another openai than other frameworks."""

from pathlib import Path

import pytest

from rollout.testing.quickstarts import play


def test_it_trains_token_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices
    played = play("litellm", tmp_path)
    assert [e.score and e.score.reward for e in played.episodes] == [1.0] * 2, [e.error for e in played.episodes]
    assert (played.requests, played.sampled) == (4, played.trained)
    assert all(len(episode.segments) == 1 for episode in played.episodes)
    assert played.difference < 1e-5

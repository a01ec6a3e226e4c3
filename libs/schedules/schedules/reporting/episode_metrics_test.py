"""Metrics of episodes against sums by hand."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from rollout import Episode, Score, Segment
from rollout.environments.environment import End
from schedules.reporting.episode_metrics import environment_metrics, episode_metrics


def segment(*log_probs: float) -> Segment:
    count = len(log_probs)
    return Segment((5, *range(count)), (False, *[True] * count), (0.0, *log_probs), (-1, *[0] * count))


def episode(
    reward: float | None,
    group: int = 0,
    end: End = "done",
    segments: Iterable[Segment] = (),
    parts: Mapping[str, float] | None = None,
    task: str = "t",
    **metrics: float,
) -> Episode:
    score = None if reward is None else Score(reward, parts or {})
    error = "boom" if reward is None else None
    end = "failed" if reward is None else end
    return Episode(f"{task}/0/0", task, 0, tuple(segments), score, end, error=error, metrics=metrics, group=group)


EPISODES = [
    episode(1.0, 0, segments=[segment(-1.0, -2.0)], parts={"right": 1.0, "format": 0.5}, turns=1),
    episode(0.0, 0, "length", segments=[segment(-3.0), segment(-4.0)], parts={"right": 0.0}, turns=3),
    episode(0.5, 1, "max_turns", segments=[segment(-0.5)], turns=2),
    episode(None, 1),
]


def test_metrics_by_hand() -> None:
    assert episode_metrics(EPISODES) == pytest.approx(
        {
            "response/failed": 1 / 4,
            "response/length": (2 + 2 + 1) / 3,
            "response/length_max": 2,
            "response/truncated": 2 / 3,
            "response/turns": 2,
            "entropy": (1 + 2 + 3 + 4 + 0.5) / 5,
            "reward/std": (0.5 + 0.0) / 2,
            "reward/part/right": 0.5,
            "reward/part/format": 0.5,
        }
    )


@pytest.mark.parametrize(
    ("end", "truncated"),
    [("done", 0), ("abort", 0), ("limit", 1), ("length", 1), ("max_turns", 1), ("max_tokens", 1), ("deadline", 1)],
)
def test_what_a_limit_ended_is_truncated(end: End, truncated: int) -> None:
    assert episode_metrics([episode(0.0, end=end, segments=[segment(-1.0)])])["response/truncated"] == truncated


def test_the_entropy_is_that_of_the_policy() -> None:
    """Tokens drawn from a known distribution: the mean surprise is its entropy."""
    chances = [0.5, 0.25, 0.25]
    drawn = [math.log(p) for p in chances for _ in range(int(100 * p))]
    found = episode_metrics([episode(0.0, segments=[segment(*drawn)])])["entropy"]
    assert found == pytest.approx(-sum(p * math.log(p) for p in chances))


def test_nothing_but_failures() -> None:
    assert episode_metrics([episode(None)]) == {"response/failed": 1.0}


def test_rates_of_tools() -> None:
    first: dict[str, Any] = {
        "tool/search/calls": 3,
        "tool/search/errors": 2,
        "tool/search/timeouts": 1,
        "tool_calls": 3,
    }
    second: dict[str, Any] = {"tool/search/calls": 1, "tool/run/calls": 2}
    found = episode_metrics(
        [
            episode(1.0, segments=[segment(-1.0)], **first),
            episode(1.0, segments=[segment(-1.0)], **second),
        ]
    )
    assert {name: value for name, value in found.items() if name.startswith("tool/")} == {
        "tool/search/calls": 2.0,
        "tool/search/errors": 0.5,
        "tool/search/timeouts": 0.25,
        "tool/run/calls": 1.0,
        "tool/run/errors": 0.0,
        "tool/run/timeouts": 0.0,
    }


def test_each_environment_has_its_reward_and_share() -> None:
    played = [episode(r, task=f"{name}/1") for name, r in (("a", 1.0), ("a", 0.0), ("a", None), ("b", 0.25))]
    assert environment_metrics(played, lambda task: task[0]) == pytest.approx(
        {"reward/environment/a": 0.5, "reward/environment/b": 0.25}
        | {"reward/environment/a/share": 2 / 3, "reward/environment/b/share": 1 / 3}
    )
    assert environment_metrics(played, lambda task: None) == {}

"""Which episodes the report shows: whole groups, drawn without a look at their rewards."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

from rollout import Episode, TaskRow
from schedules.reporting.episode_metrics_test import episode, segment
from schedules.reporting.episode_samples import EpisodeSamples, episode_record, expected_answer, failure_note

ROWS = [TaskRow(f"row-{i}", {"answer": i}) for i in range(10)]


def step(
    rewards: Callable[[int, int], float | None] = lambda group, index: float(group == 3),
    groups: int = 10,
    size: int = 4,
) -> list[Episode]:
    return [episode(rewards(g, i), g, segments=[segment(-1.0)]) for g in range(groups) for i in range(size)]


def show(step: int = 1, seed: int = 0) -> EpisodeSamples:
    return EpisodeSamples(step, seed, str, lambda task: None)


def test_a_group_is_shown_whole_with_what_was_expected() -> None:
    episodes = step()
    shown_rows = show().groups(episodes, [float(i) for i in range(40)], ROWS, 2)
    assert len(shown_rows) == 8
    assert len({e["group"] for e in shown_rows}) == 2
    for e in shown_rows:
        assert e["expected"] == str(e["group"])
        assert e["advantage"] // 4 == e["group"]


def test_every_group_has_the_same_chance_whatever_it_earned() -> None:
    """A9: 480 of 480 episodes shown had an advantage."""
    episodes = step()
    counts = Counter(
        kept["group"] for number in range(2000) for kept in show(number).groups(episodes, [0.0] * 40, ROWS, 1)[:1]
    )
    assert all(abs(counts[group] - 200) < 70 for group in range(10))  # five deviations of 13
    assert show(7).groups(episodes, [0.0] * 40, ROWS, 1) == show(7).groups(episodes, [0.0] * 40, ROWS, 1)


def test_held_out_failures_are_shown_and_solved_ones_are_not() -> None:
    episodes = [
        episode(r, i, segments=[segment(-1.0)] if r is not None else []) for i, r in enumerate([1, 0, None, 0.5])
    ]
    shown_rows = show().failures(episodes, ROWS, 5)
    assert [(e["group"], e["reward"]) for e in shown_rows] == [(1, 0.0), (2, None), (3, 0.5)]
    assert {e["split"] for e in shown_rows} == {"held-out"}
    assert shown_rows[1]["error"] == "boom"
    assert len(show().failures(episodes, ROWS, 1)) == 1
    worthless = [episode(-1.0, i, segments=[segment(-1.0)]) for i in range(3)]
    assert [len(show().failures(some, ROWS, 5)) for some in (worthless, episodes[:1], episodes[3:])] == [3, 0, 0]


def test_an_episode_of_several_streams_is_told_in_full() -> None:
    record = episode_record(
        episode(1.0, segments=[segment(-1.0), segment(-2.0, -3.0)], parts={"right": 1.0}), ROWS[2], str
    )
    assert record["log_probs"] == [0.0, -1.0, 0.0, -2.0, -3.0]
    assert len(record["tokens"]) == len(record["mask"]) == len(record["versions"]) == 5
    assert record["parts"] == {"right": 1.0}


def test_where_the_expected_answer_stands() -> None:
    prompt = SimpleNamespace(reference="18")
    assert expected_answer(TaskRow("a", {"prompt": prompt})) == "18"
    assert expected_answer(TaskRow("a", {"answer": 3})) == "3"
    assert expected_answer(TaskRow("a", {})) is None


def test_why_episodes_of_a_step_failed_is_told_on_a_line() -> None:
    assert failure_note("step 1", [episode(1.0, 0)]) is None
    reasons = ["lost"] * 3 + ["a\nb\x1b[2J"] * 2 + ["c" * 500] * 2 + ["rare"]
    failed = [replace(episode(None, i), error=reason) for i, reason in enumerate(reasons)]
    note = failure_note("step 7", [episode(1.0, 9), *failed])
    assert note is not None
    assert note.startswith("step 7: 8 of 9 episodes failed: 3 x lost; 2 x a b?[2J; 2 x ccc")
    assert note.endswith("ccc...; and 1 more reasons")
    assert len(note) < 500

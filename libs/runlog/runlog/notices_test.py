"""What a run that does not learn is told, from its metrics alone: at the head of the report, with counts."""

from pathlib import Path
from typing import Any

import pytest

from runlog import RunLog, write_report
from runlog.notices import row_notices, run_notices

FINE = {"reward/min": 0.0, "reward/max": 1.0, "response/truncated": 0.5, "rollout/episodes": 8.0, "eval/truncated": 0.0}
CUT = {"response/truncated": 1.0, "reward/min": 0.0, "reward/max": 0.0, "rollout/episodes": 8.0, "reward/called": 0.0}


def rows(*steps: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"step": number, **row} for number, row in enumerate(steps)]


def test_a_run_that_learns_is_told_nothing() -> None:
    run = rows({"eval/truncated": 0.0, "eval/accuracy": 0.0}, *[FINE] * 4, {"loss": 1.0, "eval/loss": 2.0})
    assert run_notices(run) == []
    assert [row_notices(row) for row in run] == [{}] * 6


def test_steps_that_trained_nothing_are_counted_by_their_reasons() -> None:
    idle: list[dict[str, Any]] = [
        {**CUT, "idle": "a"},
        FINE,
        {**FINE, "idle": "b"},
        {**FINE, "idle": "a"},
        *({"idle": c} for c in "cde"),
    ]
    first, *_ = run_notices(rows({}, *idle))
    assert first == "6 of 7 steps trained nothing (first: step 1): 2 x a; 1 x b; 1 x c; and 2 more reasons"
    assert row_notices({"step": 3, **idle[2]}) == {"idle": "step 3 trained nothing: b"}


@pytest.mark.parametrize("called", [True, False])
def test_responses_that_are_all_cut_off_are_counted_and_a_reward_that_was_never_called_is_told(called: bool) -> None:
    cut = {key: value for key, value in CUT.items() if key != "reward/called" or not called}
    told = run_notices(rows({"eval/truncated": 1.0}, FINE, cut, {**FINE, "reward/max": 2.0}, cut))
    never = "" if called else "; the reward function was never called"
    assert told == [
        f"every response was cut off by a limit in 2 of 4 steps (16 responses, first: step 2){never}",
        "every held-out response was cut off by a limit in 1 of 3 evaluations (first: step 0)",
    ]
    assert row_notices({"step": 2, **cut}) == {"truncated": f"step 2: every response was cut off by a limit{never}"}


def test_rewards_that_never_differ_are_told_and_those_of_one_step_are_not() -> None:
    same = {**FINE, "reward/min": 0.25, "reward/max": 0.25}
    assert run_notices(rows({}, same, same)) == [
        "every reward was 0.25 (16 responses, 2 steps): rewards that are all the same tell no response from another"
    ]
    assert run_notices(rows({}, same, {**same, "reward/max": 0.5})) == []
    assert run_notices(rows({}, same, {**same, "reward/min": 0.5, "reward/max": 0.5})) == []


def test_an_accuracy_that_is_none_and_a_warm_start_that_fell_short_are_told_once() -> None:
    warm = {"warm_start/steps": 20.0, "warm_start/accuracy": 0.1, "warm_start/wanted": 0.4}
    told = run_notices(rows({**warm, "eval/accuracy": 0.0}, {"eval/accuracy": -8.0}, {"eval/accuracy": 26.0}))
    warm_start, score = told
    assert warm_start == "the warm start ended after 20 steps at 10.0%, below the 40.0% that it was to reach"
    assert score.startswith("step 1: eval/accuracy is -8, the mean of rewards outside [0, 1]: declare held_out_metric")
    assert run_notices(rows({**warm, "warm_start/accuracy": 0.4})) == []


def test_the_report_says_so_at_its_head(tmp_path: Path) -> None:
    with RunLog(tmp_path, tensorboard=False) as log:
        log.metrics(0, {"eval/score": -17.0})
        log.metrics(1, {**CUT, "idle": "rewards <b>equal</b>", "eval/score": -8.5})
    page = write_report(tmp_path).read_text()
    assert "1 of 1 steps trained nothing (first: step 1): 1 x rewards &lt;b&gt;equal&lt;/b&gt;" in page
    assert page.index('class="notices"') < page.index('class="tiles"')
    tiles = page[page.index('class="tiles"') : page.index('id="curves"')]
    assert "Held-out score" in tiles
    assert "-8.5" in tiles
    assert "-17 before" in tiles
    with RunLog(tmp_path / "fine", tensorboard=False) as log:
        log.metrics(1, FINE)
    assert 'class="notices"' not in write_report(tmp_path / "fine").read_text()

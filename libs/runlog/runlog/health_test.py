"""Which numbers of a run's last steps are called sick, by rows as the quickstart writes them."""

from pathlib import Path
from typing import Any

import pytest

from runlog import RunLog, write_report
from runlog.health import BOUNDS, WINDOW, Check, check_health, health_row

FINE: dict[str, Any] = {
    "reward": 0.5,
    "reward/std": 0.35,
    "reward/mixed_groups": 0.8,
    "response/truncated": 0.01,
    "entropy": 0.2,
    "rollout/episodes": 512.0,
    "log_prob_difference": 0.02,
    "time/step_s": 2.0,
    "time/wait_for_rollout_s": 0.5,
    "train/grad_norm": 1.0,
    "train/approx_kl": 0.001,
    "train/kl": 0.02,
    "train/mismatch/ess": 0.9,
    "train/skipped": 0.0,
    "schedule/staleness": 1.0,
}
SICK: dict[str, dict[str, Any]] = {
    "share of responses cut off": {"response/truncated": 0.7},
    "share of groups without signal": {"reward/mixed_groups": 0.05},
    "distance of the sampler's log-probs from the trainer's": {"log_prob_difference": 0.4},
    "KL to the reference model": {"train/kl": 3.0},
    "KL of a step's updates": {"train/approx_kl": 0.2},
    "entropy of sampled tokens, nats": {"entropy": 0.0001},
    "effective sample size of off-policy weights": {"train/mismatch/ess": 0.1},
    "staleness, versions": {"schedule/staleness": 9.0},
    "share of steps without an update": {"train/skipped": 1.0},
    "share of time that training waits for responses": {"time/wait_for_rollout_s": 1.5},
    "gradient norm over its median before": {"train/grad_norm": 30.0},
    "fall of the reward below its best, deviations": {"reward": 0.1},
}


def rows(*steps: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"step": 0, "eval/accuracy": 0.4}, *({"step": number + 1, **row} for number, row in enumerate(steps))]


def sick(*steps: dict[str, Any]) -> list[str]:
    return [check.name for check in check_health(rows(*steps)) if not check.healthy]


def test_healthy_runs_and_those_of_other_kinds_are_told_nothing() -> None:
    assert sick(*[FINE] * 12) == []
    assert check_health(rows(*[FINE] * (WINDOW - 1))) == []
    assert check_health(rows(*[{"loss": 1.0, "response/truncated": 1.0}] * 9)) == []
    assert {bound.name for bound in BOUNDS} < SICK.keys()


@pytest.mark.parametrize("name", SICK)
def test_each_number_is_told_alone_with_what_to_change(name: str) -> None:
    found = check_health(rows(*[FINE] * 8, *[FINE | SICK[name]] * WINDOW))
    told = [check for check in found if not check.healthy]
    assert [check.name for check in told] == [name]
    assert found[0] == told[0]
    assert str(told[0]).startswith(f"{name} ")
    assert "--" in told[0].change
    assert sick(*[FINE] * 8, FINE | SICK[name], FINE | SICK[name], *[FINE] * 8) == []


def test_steps_that_computed_nothing_say_nothing_of_updates() -> None:
    idle = {**FINE, "train/computed_sequences": 0.0, "train/mismatch/ess": 0.0, "train/grad_norm": 0.0}
    assert sick(*[FINE] * 8, *[idle] * WINDOW) == []


def test_few_responses_fall_by_chance() -> None:
    few = {**FINE, "rollout/episodes": 16.0}
    assert sick(*[few] * 8, *[{**few, "reward": 0.1}] * WINDOW) == []
    assert sick(*[few] * 16, *[{**few, "reward": 0.1}] * 16) == ["fall of the reward below its best, deviations"]


def test_components_that_never_differ_are_named() -> None:
    parts = [{**FINE, "reward/part/form": 0.0, "reward/part/right": 0.1 * number} for number in range(4)]
    (first, *_) = check_health(rows(*parts))
    assert (first.name, first.value, first.healthy) == ("reward components that never differ", 1.0, False)
    assert "form tells no response from another" in first.change


def test_what_is_no_number_is_not_healthy() -> None:
    assert not Check("x", float("nan"), 1.0, "y").healthy
    assert not Check("x", float("nan"), 1.0, "y", least=True).healthy


def test_the_report_has_a_table_at_its_head(tmp_path: Path) -> None:
    with RunLog(tmp_path, tensorboard=False) as log:
        for row in rows(*[FINE] * 8, *[FINE | {"entropy": 0.001}] * WINDOW):
            log.metrics(row["step"], row)
    page = write_report(tmp_path).read_text()
    head = page[page.index('id="health"') : page.index('id="curves"')]
    assert "1 of 12 numbers over a threshold" in head
    assert "0.001, healthy at least 0.005: lower --learning-rate" in head
    assert head.count('class="sick"') == 1


@pytest.mark.parametrize("name", SICK)
def test_a_loop_may_keep_of_its_rows_what_the_checks_read(name: str) -> None:
    part = {"reward/part/form": 1.0, "reward/part/answer": 0.5, "loss": 1.0, "eval/accuracy": 0.5}
    whole = rows(*[FINE | part] * 8, *[FINE | part | SICK[name]] * WINDOW)
    kept = [health_row(row) for row in whole]
    assert check_health(kept) == check_health(whole)
    assert not any("loss" in row for row in kept)

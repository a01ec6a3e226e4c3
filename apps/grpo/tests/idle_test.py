"""Runs that do not learn, from end to end: they say so, stop after a few steps, and go on where that is allowed."""

import re
from pathlib import Path
from typing import Any

import pytest

from apps.common.run.checkpoints import last_checkpoint
from apps.common.run.idle_steps import IdleRunError
from apps.common.testing.weight_delta import load_tensors
from apps.grpo.main import run
from apps.grpo.testing.idle import idle_recipe
from apps.grpo.testing.schedules import ASYNC, ONE, SYNC, rows, small
from schedules.config import ScheduleConfig

SCHEDULES = [SYNC, ONE, ASYNC]
MANY: dict[str, Any] = {"steps": 8, "save_every": 8, "eval_every": 8}
SAME = "every reward was 0.5 (16 responses)"


def unchanged_weights(run_dir: Path) -> bool:
    before, after = (load_tensors(run_dir / name) for name in ("model", "export"))
    return all(after[name].equal(tensor) for name, tensor in before.items())


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.mode)
def test_steps_in_a_row_that_train_nothing_stop_a_run_and_it_goes_on_where_they_may(
    schedule: ScheduleConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run_dir = idle_recipe("same", range(4, 9)), tmp_path / "run"
    with pytest.raises(
        IdleRunError, match=r"step 6: 3 steps in a row trained nothing, the last one as every reward was"
    ):
        run(small(run_dir, schedule, allow_idle_steps=3, **MANY), recipe)
    assert f"step 4 trained nothing: {SAME}" in capsys.readouterr().out
    assert [row["train/idle_steps"] for row in rows(run_dir)[1:]] == [0, 0, 0, 1, 2, 3]
    told = [row.get("idle", "") for row in rows(run_dir)[1:]]
    assert [text.startswith(SAME) for text in told] == [False] * 3 + [True] * 3
    page = (run_dir / "report.html").read_text()
    assert "3 of 6 steps trained nothing (first: step 4): " in page
    assert (last_checkpoint(run_dir) or (0, None))[0] == 6
    assert not (run_dir / "export").exists()
    with pytest.raises(IdleRunError, match=r"step 7: 4 steps in a row"):
        run(small(run_dir, schedule, allow_idle_steps=4, resume=True, **MANY), recipe)
    result = run(small(run_dir, schedule, allow_idle_steps=None, resume=True, **MANY), recipe)
    assert result.steps == 8
    assert [row["train/idle_steps"] for row in rows(run_dir)[1:]] == [0, 0, 0, 1, 2, 3, 4, 5]
    assert "warning: 5 of 8 steps trained nothing (first: step 4): " in capsys.readouterr().out


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.mode)
def test_a_step_whose_episodes_all_failed_is_told_and_the_run_goes_on(
    schedule: ScheduleConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    run(small(run_dir, schedule), idle_recipe("failed", range(2, 3)))
    told = [row.get("idle") for row in rows(run_dir)[1:]]
    assert told == [None, "every episode failed (16 episodes)", None, None]
    output = capsys.readouterr().out
    assert "step 2 trained nothing: every episode failed (16 episodes)" in output
    assert "step 2: 16 of 16 episodes failed: 16 x " in output
    assert not unchanged_weights(run_dir)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.mode)
def test_sigterm_ends_a_run_after_its_step_with_a_checkpoint_and_a_report(
    schedule: ScheduleConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, run_dir, recipe = tmp_path / "sent.py", tmp_path / "run", idle_recipe("graded", None)
    file.write_text("import os\ndef sent(step):\n    os.kill(os.getpid(), 15 if step == 2 else 0)\n    return 0.0\n")
    config = small(run_dir, schedule, metric=(f"{file}:sent",), **MANY)
    with pytest.raises(SystemExit) as stop:
        run(config, recipe)
    assert stop.value.code == 143
    assert f"SIGTERM: stopped after step 2; --resume --run-dir {run_dir} goes on" in capsys.readouterr().out
    assert (last_checkpoint(run_dir) or (0, None))[0] == 2
    assert (run_dir / "report.html").exists()
    run(small(run_dir, schedule, resume=True, metric=(f"{file}:sent",), **MANY), recipe)
    assert [row["step"] for row in rows(run_dir)] == list(range(9))


def test_a_first_step_whose_episodes_all_failed_is_told(tmp_path: Path) -> None:
    run(small(tmp_path / "run", ASYNC, steps=2), idle_recipe("failed", range(1, 3)))
    assert [("idle" in row) for row in rows(tmp_path / "run")] == [False, True, True]


@pytest.mark.parametrize("schedule", [SYNC, ASYNC], ids=lambda schedule: schedule.mode)
def test_graded_rewards_are_a_score_from_the_first_evaluation_on(
    schedule: ScheduleConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run keeps the name, whatever the rewards look like then."""
    run_dir = tmp_path / "run"
    first = run(small(run_dir, schedule, steps=2), idle_recipe("graded", None))
    output = capsys.readouterr().out
    assert first.metric == "score"
    assert not re.search(r"accuracy|%", output)
    assert f"held-out score before │ {first.accuracy_before:.4g}" in output
    page = (run_dir / "report.html").read_text()
    assert "Held-out score" in page
    assert "Held-out accuracy" not in page
    run(small(run_dir, schedule, resume=True), idle_recipe("same", range(1, 2)))
    assert [[name for name in row if name in ("eval/accuracy", "eval/score")] for row in rows(run_dir)] == [
        *(["eval/score"], [], ["eval/score"], [], ["eval/score"])
    ]

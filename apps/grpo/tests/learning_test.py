"""The default run as a user gets it, held to what the README says: the reward rises, and not by accident."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from apps.grpo.config import WarmStart
from apps.grpo.main import run
from apps.grpo.registry import recipes
from apps.grpo.train import Result

Learned = tuple[Result, Path]
"""What a run came to, and its folder."""

QUICKSTART = recipes()["quickstart"].config


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    run_dir = tmp_path_factory.mktemp("quickstart")
    return run(replace(QUICKSTART, run_dir=run_dir)), run_dir


def test_held_out_accuracy_rises_by_25_points(learned: Learned) -> None:
    result, _ = learned
    assert result.accuracy_after >= result.accuracy_before + 0.25


def test_sampler_and_trainer_agree_all_the_way(learned: Learned) -> None:
    _, run_dir = learned
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("log_prob_difference_max", 0.0) for row in rows) < 1e-2


def test_shuffled_advantages_teach_nothing(learned: Learned, tmp_path: Path) -> None:
    result, run_dir = learned
    warm = run_dir / "warm-start" / "export"
    control = replace(
        QUICKSTART,
        model=warm,
        warm_start=WarmStart(),
        run_dir=tmp_path,
        steps=30,
        eval_every=30,
        control_run="shuffled-advantages",
    )
    assert run(control).accuracy_after < result.accuracy_before + 0.1

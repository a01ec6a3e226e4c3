"""quickstart-image as a user gets it: held-out pictures are answered better, by the 20 points that are asked of it.

Five minutes on one core, so it is run by name: `bazel test //apps/grpo:tests/images_learning_test`.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from apps.grpo.main import run
from apps.grpo.registry import recipes
from apps.grpo.train import Result

Learned = tuple[Result, Path]
"""What a run came to, and its folder."""


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    run_dir = tmp_path_factory.mktemp("pictures")
    return run(replace(recipes()["quickstart-image"].config, run_dir=run_dir)), run_dir


def test_held_out_accuracy_rises_by_20_points(learned: Learned) -> None:
    """34.9 (35.4 to 70.3 % of 192) on 2026-11-27."""
    result, _ = learned
    assert result.accuracy_after >= result.accuracy_before + 0.2


def test_sampler_and_trainer_see_the_same_pictures_all_the_way(learned: Learned) -> None:
    _, run_dir = learned
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("log_prob_difference_max", 0.0) for row in rows) < 1e-2

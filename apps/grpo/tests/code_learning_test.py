"""quickstart-code as a user gets it: more functions are repaired than by a control run from the same model.

Ten to fifteen minutes on two cores, so it is run by name: `bazel test //apps/grpo:tests/code_learning_test`.
"""

import math
from dataclasses import replace
from pathlib import Path

from apps.grpo.config import WarmStart
from apps.grpo.main import run
from apps.grpo.registry import recipes

BASE = recipes()["quickstart-code"].config


def test_it_learns_five_standard_deviations_above_its_shuffled_control(tmp_path: Path) -> None:
    learned = run(replace(BASE, run_dir=tmp_path / "run"))
    warm = tmp_path / "run" / "warm-start" / "export"
    control = replace(BASE, model=warm, warm_start=WarmStart(), control_run="shuffled-advantages")
    # One that unlearns all has nothing left to train on.
    shuffled = run(replace(control, allow_idle_steps=None, run_dir=tmp_path / "control"))
    assert learned.accuracy_after > learned.accuracy_before + 0.15
    assert learned.accuracy_after - shuffled.accuracy_after > 5 * deviation(
        BASE.data.eval_prompts, learned.accuracy_after, shuffled.accuracy_after
    )


def deviation(count: int, *shares: float) -> float:
    """The standard deviation of a difference of two shares of so many answers."""
    return math.sqrt(sum(share * (1 - share) / count for share in shares))

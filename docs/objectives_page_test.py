"""The page objectives.md has every name that a run can ask for, and none besides."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from apps.common.cli.flags import flag
from apps.grpo.config import RewardShaping
from objectives.choices import CORRECTIONS, DIVERGENCES, GROUP_SIZES, KL_ESTIMATORS, LOSS_OPTIONS

PAGE = (Path(__file__).parent / "objectives.md").read_text()
CHAPTERS: dict[str, set[str]] = {
    "Advantages": {*GROUP_SIZES},
    "Policy losses": {*LOSS_OPTIONS},
    "KL to the reference": {*KL_ESTIMATORS},
    "Off-policy weights": {str(name) for name in CORRECTIONS if name != "none"},
    "Distillation": {*DIVERGENCES},
    "Shaping of rewards": {flag(f"shaping.{field.name}") for field in fields(RewardShaping)},
}


@pytest.mark.parametrize("title", CHAPTERS)
def test_a_table_has_the_names_of_its_flag(title: str) -> None:
    (chapter,) = re.findall(rf"^## {title}.*?(?=^## |\Z)", PAGE, re.M | re.S)
    rows = [line.split(" | ") for line in chapter.splitlines() if line.startswith("| `")]
    names = [row[0].removeprefix("| ").replace(" v", "").strip("`") for row in rows]
    assert len(names) == len(set(names))
    assert set(names) == CHAPTERS[title]
    assert len({len(row) for row in rows}) == 1

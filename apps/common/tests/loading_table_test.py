"""`--loading` tells what a rank holds while the recipes' models are read."""

import re
from typing import Any

import pytest

from apps.grpo.main import main as grpo_main
from apps.grpo.recipes.qwen3_5_27b_fsdp2 import QWEN3_5_27B
from apps.grpo.recipes.qwen3_5_35b_a3b_megatron import QWEN3_5_35B_A3B
from apps.grpo.recipes.qwen3_5_122b_a10b_megatron import QWEN3_5_122B_A10B
from apps.sft.main import main as sft_main
from runplan.estimates.loading import loading_table


@pytest.mark.parametrize(
    ("main", "models"),
    [(grpo_main, ["27B", "35B-A3B", "122B-A10B"]), (sft_main, ["397B-A17B"])],
    ids=["grpo", "sft"],
)
def test_the_apps_print_it(main: Any, models: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--loading"])
    assert stop.value.code == 0
    rows = capsys.readouterr().out.splitlines()
    for name in models:
        (row,) = (row for row in rows if row.startswith(f"| Qwen3.5-{name} |"))
        assert len(re.findall(r"[\d.]+ \+ [\d.]+", row)) == 5  # of 1 to 64 ranks


def test_the_table_names_the_models_of_the_recipes() -> None:
    table = loading_table([QWEN3_5_27B, QWEN3_5_35B_A3B, QWEN3_5_122B_A10B, QWEN3_5_27B], ranks=(1, 32))
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| Qwen")]
    assert [row[0].strip("| ") for row in rows] == ["Qwen3.5-122B-A10B", "Qwen3.5-27B", "Qwen3.5-35B-A3B"]
    assert rows[1][1:] == ["26.9", "100", "100.2 + 2.37", "3.1 + 0.07 |"]

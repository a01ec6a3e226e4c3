"""What README.md and status.md count is what the tree has: `--recipe list --plan`, `formats()`."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from apps.grpo.main import main as grpo
from apps.sft.main import main as sft
from chat_tools import formats

ROOT = Path(__file__).parents[1]
COUNTED = re.compile(r"(\d+) recipes, (\d+) can be run today, (\d+) untested, (\d+) shrunk")


@pytest.mark.parametrize("page", ["README.md", "docs/status.md"])
def test_a_page_counts_the_recipes_as_the_apps_do(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """How many can be run, how many start untested alone, how many run shrunk, of how many."""
    totals = [0, 0, 0, 0]
    for main in (grpo, sft):
        with pytest.raises(SystemExit):
            main(["--recipe", "list", "--plan"])
        found = COUNTED.fullmatch(capsys.readouterr().out.splitlines()[-1])
        assert found is not None
        totals = [total + int(count) for total, count in zip(totals, found.groups(), strict=True)]
    recipes, ready, untested, shrunk = totals
    text = " ".join((ROOT / page).read_text().split())
    assert re.findall(r"(\d+ of \d+)", text) == [f"{count} of {recipes}" for count in (ready, untested, shrunk)]


def test_the_front_page_counts_the_formats_of_tool_calls() -> None:
    assert re.findall(r"\| (\d+) formats, streamed", (ROOT / "README.md").read_text()) == [str(len(formats()))]


def listed(values: Iterable[object]) -> str:
    *before, last = map(str, values)
    return f"{', '.join(before)} and {last}" if before else last


def test_the_front_page_has_the_figures_of_the_quickstart() -> None:
    runs = json.loads((ROOT / "docs/benchmarks/quickstart_ten_seeds.json").read_text())["runs"]
    rows = next(run["values"] for run in reversed(runs) if re.match("two (idle )?CPU cores", run["device"]))
    text = " ".join((ROOT / "README.md").read_text().split())
    seeds = listed(f"`{name.removeprefix('seed ')}`" for name in rows).replace("`", "`--seed ", 1)
    after, seconds = (listed(row[name] for row in rows.values()) for name in ("after", "seconds"))
    assert f"With {seeds} it ended at {after} % of held-out sums, in {seconds} seconds on two CPU cores" in text

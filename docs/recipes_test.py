"""What README.md and status.md count is what the tree has: `--recipe list --plan`, `formats()`."""

import json
import re
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


def test_the_front_page_has_the_figures_of_the_quickstart() -> None:
    values = json.loads((ROOT / "docs/benchmarks/quickstart.json").read_text())["runs"][-1]["values"].values()
    text = " ".join((ROOT / "README.md").read_text().split())
    before, after = ([str(value[name]) for value in values] for name in ("before", "after"))
    seconds = [value["seconds"] for value in values]
    said = "Three seeds took it from {}, {} and {} % of held-out sums to {}, {} and {} % in {} to {} seconds"
    assert said.format(*before, *after, min(seconds), max(seconds)) in text

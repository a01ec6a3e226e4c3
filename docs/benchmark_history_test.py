"""docs/benchmark_history.md is what its files say, and a run says when, where and with what it was made."""

import json
import re
from pathlib import Path

import pytest
from draw_benchmarks import page, read, section

DOCS = Path(__file__).parent
FILES = sorted((DOCS / "benchmarks").glob("*.json"))


def test_the_page_is_drawn_from_the_files() -> None:
    assert len(FILES) > 5
    assert page([read(path) for path in FILES]) == (DOCS / "benchmark_history.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_run_is_dated(path: Path) -> None:
    benchmark = read(path)
    assert benchmark.command
    for run in benchmark.runs:
        assert re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", run.date)
        assert run.device
        assert run.values
        assert all(run.values.values())


def test_runs_of_a_case_stand_together_by_date(tmp_path: Path) -> None:
    def run(date: str, **values: object) -> dict[str, object]:
        return {"date": date, "device": "cpu", "versions": {"torch": "2"}, "values": values}

    path = tmp_path / "x.json"
    runs = [run("2026-02-01", a={"ms": 1200.5}), run("2026-01-01", a={"ms": 2}, b={"ok": True})]
    path.write_text(json.dumps({"command": "c", "runs": runs}))
    rows = [line for line in section(read(path)) if line.startswith("| ")][2:]
    first = ["| a | 2026-01-01 | cpu | 2 |  |", "| a | 2026-02-01 | cpu | 1,200.5 |  |"]
    assert rows == [*first, "| b | 2026-01-01 | cpu |  | yes |"]
    path.write_text(json.dumps({"command": "c", "date": "2026-01-01", "device": "cpu", "values": {"a": {}}}))
    with pytest.raises(ValueError, match=r"x\.json: a run without versions"):
        read(path)

"""A page about several runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from runlog.compare import names_of, write_comparison
from runlog.run import RunLog


def run(path: Path, rewards: list[float], **config: Any) -> Path:
    with RunLog(path, config, tensorboard=False) as log:
        for step, reward in enumerate(rewards, 1):
            log.metrics(step, {"reward": reward, "loss": reward, "same": 1.0})
    return path


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return dict(json.loads(found[1]))


def test_runs_stand_side_by_side(tmp_path: Path) -> None:
    runs = [run(tmp_path / "a", [0.1, 0.2], lr=1, steps=2), run(tmp_path / "<b>", [0.5, 0.5, 0.5], lr=2, steps=2)]
    page = write_comparison(runs, tmp_path / "page.html").read_text()
    charts = {chart["name"]: chart for chart in data_of(page)["charts"]}
    assert list(charts) == ["reward", "loss"]
    lines = charts["loss"]["lines"]  # the second run's never changes, and is drawn beside the first one's
    assert [(one["run"], one["x"], one["y"]) for one in lines] == [(0, [1, 2], [0.1, 0.2]), (1, [1, 2, 3], [0.5] * 3)]
    cells = re.findall(r"<td>(.*?)</td>", page)
    assert cells[:2] == ["0.2 (0.1 at first, 1-step means)", "0.5 (0.5 at first, 1-step means)"]
    assert cells[-2:] == ["1", "2"]
    assert "1 settings are the same in all" in page
    assert "&lt;b&gt;" in page
    assert "<b>" not in page


def test_runs_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    one = run(tmp_path / "a", [0.1])
    for wrong in ([one], [one, one], [tmp_path / str(k) for k in range(9)]):
        with pytest.raises(ValueError, match=f"two to 8 different run directories, not {len(wrong)}"):
            write_comparison(wrong, tmp_path / "page.html")
    with pytest.raises(ValueError, match=r"none/metrics.jsonl is missing or empty"):
        write_comparison([one, tmp_path / "none"], tmp_path / "page.html")
    assert names_of([Path("/x/a/run"), Path("/x/b/run")]) == ["a/run", "b/run"]


def test_many_curves_are_left_out_and_counted(tmp_path: Path) -> None:
    for name in "ab":
        with RunLog(tmp_path / name, tensorboard=False) as log:
            for step in range(60):
                log.metrics(step, {f"m{k}": (step * k) % 7 for k in range(1, 200)})
    path = write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "page.html", max_bytes=150_000)
    page = path.read_text()
    assert path.stat().st_size <= 150_000
    left = re.search(r"(\d+) more curves found no room", page)
    assert left is not None
    assert len(data_of(page)["charts"]) + int(left[1]) == sum(k % 7 > 0 for k in range(1, 200))

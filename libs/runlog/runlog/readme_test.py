"""The README's example runs as it stands."""

import re
from pathlib import Path

import pytest


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})  # our own README
    written = {p.name for p in (tmp_path / "runs" / "demo").iterdir()}
    assert written == {"config.json", "metrics.jsonl", "episodes.jsonl", "report.html"}

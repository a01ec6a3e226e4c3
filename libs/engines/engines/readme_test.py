"""The README's example runs."""

from pathlib import Path

import pytest


def test_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert (tmp_path / "export" / "config.json").is_file()

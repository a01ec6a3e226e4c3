"""The README's example runs."""

from pathlib import Path
from typing import Any


def test_example() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["plan"].ready
    assert 0 < names["peak"].states < names["peak"].bytes

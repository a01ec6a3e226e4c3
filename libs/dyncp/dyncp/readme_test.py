"""The README's example runs, and the README stays on one screen."""

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, str(README), "exec"), names)
    assert names["y"].shape == names["x"].shape
    assert names["group"].cp_size > 1


def test_one_screen() -> None:
    assert README.read_text().count("\n") <= 60

from pathlib import Path
from typing import Any


def test_the_example_of_the_operations_runs() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[2].split("```")[0]
    assert len(code.strip().splitlines()) <= 10
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["o"].shape == (18, 4, 16)
    assert names["o_next"].shape == (3, 4, 16)
    assert "torch" in names["runnable"]["attention"]

"""The README's example runs."""

from pathlib import Path


def test_example():
    text = (Path(__file__).parents[1] / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {})

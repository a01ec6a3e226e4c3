"""The pages of docs/ are programs: their Python blocks run from top to bottom, each page in a process of its own.

A block that begins with `# apps/grpo/recipes/NAME.py` is that file: it is found like the recipes of the tree.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent
PAGES = sorted(page.name for page in DOCS.glob("add-*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
FILE = re.compile(r"# apps/grpo/recipes/(\w+\.py)\n")
FIND_RECIPES = "import apps.grpo.recipes\napps.grpo.recipes.__path__.append({folder!r})\n"


def test_every_page_is_linked() -> None:
    """The architecture page lists them all, and nothing that is not there."""
    linked = re.findall(r"\((add-[\w-]+\.md)\)", (DOCS / "architecture.md").read_text())
    assert sorted(linked) == PAGES


@pytest.mark.parametrize("name", PAGES)
def test_the_page_runs(name: str, tmp_path: Path) -> None:
    """Without an error; its asserts hold."""
    code = ""
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    for block in BLOCK.findall((DOCS / name).read_text()):
        if found := FILE.match(block):
            (recipes / found[1]).write_text(block)
            code += FIND_RECIPES.format(folder=str(recipes))
        else:
            code += block
    assert "assert" in code
    script = tmp_path / "page.py"
    script.write_text(code)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

"""The page extend.md is a program: each of its twelve examples trains two steps, away from the tree.

Long: every example is a run. `build/proofs` runs the same page where only wheels are installed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import extend_run

from apps.common.cli.extensions import POINTS, help_of
from apps.grpo.config import GrpoConfig

DOCS = Path(__file__).parent
PAGE = (DOCS / "extend.md").read_text()


def test_the_page_has_every_choice() -> None:
    """A row of its table and a section with an example for each, and the table's arguments are those of the code."""
    rows = dict(re.findall(r"^\| ([\w -]+) \| `(--[\w.-]+)` \|", PAGE, re.M))
    names = [point.kind.replace("-", " ").replace("tool format", "tool-call format") for point in POINTS]
    assert list(rows) == names
    shown = [title.lower() for title, text in extend_run.sections(PAGE) if extend_run.COMMAND.search(text)]
    assert sorted(shown) == sorted(names)
    for point, row in zip(POINTS, re.findall(r"^\| [\w -]+ \| `--.*$", PAGE, re.M), strict=True):
        assert all(f"`{name}`" in row for name in point.inputs), (point, row)
        assert "NAME=VALUE" in help_of(point.kind, GrpoConfig)


def test_every_example_trains_two_steps(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, extend_run.__file__, str(DOCS / "extend.md")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    assert len(re.findall(r"^ran ", done.stdout, re.M)) == len(POINTS)

"""Run the page extend.md away from the tree: write its files here, and run its commands one after the other.

    python extend_run.py PAGE [SECTION ...]

All of them run in this one process, by the apps that are installed (`tessera_apps`), or else by those of a checkout on
PYTHONPATH (`apps`). Prints a line for each command; ends with an error at the first that fails, or that trains nothing.
"""

import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

INSTALLED = find_spec("tessera_apps") is not None
SECTION = re.compile(r"^## (.+)$", re.M)
BLOCK = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```", re.M | re.S)
COMMAND = re.compile(r"^    ((?:python|tessera-grpo) .*)$", re.M)
FLAGS = re.compile(r"^    (--max-steps .*)$", re.M)


def sections(page: str) -> Iterator[tuple[str, str]]:
    """Yield the title and the text of each section."""
    parts = SECTION.split(page)
    yield from zip(parts[1::2], parts[2::2], strict=True)


def run_page(page: str, wanted: list[str]) -> None:
    """Write all files of the page, and run the commands of its sections, or of those wanted."""
    grpo: Callable[..., None] = import_module(f"{'tessera_apps.apps' if INSTALLED else 'apps'}.grpo.main").main
    for name, code in BLOCK.findall(page):
        Path(name).write_text(code if INSTALLED else code.replace("tessera_apps.apps.", "apps."), encoding="utf-8")
    (flags,) = FLAGS.findall(page)
    for title, text in sections(page):
        for line in COMMAND.findall(text) if not wanted or title in wanted else ():
            words = shlex.split(line)
            if words[0] == "python":
                runpy.run_path(words[1], run_name="__main__")
                continue
            run_dir = Path("letters" if title == "Environment" else title.replace(" ", "-"))
            place = [] if "--run-dir" in words else ["--run-dir", str(run_dir)]
            grpo([*words[1:], *flags.split(), *place])
            check(run_dir, line)


def check(run_dir: Path, line: str) -> None:
    """Print what a run trained; AssertionError where it trained nothing, or does not say what code it had."""
    rows = [json.loads(row) for row in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2], line
    assert max(row.get("train/grad_norm", 0.0) for row in rows) > 0, line
    (start,) = json.loads((run_dir / "own_code.json").read_text())
    files = [f"{Path(one['file']).name}:{one['name'].rpartition(':')[2]}" for one in start]
    given = [word for word in shlex.split(line) if ".py:" in word]
    assert set(given) <= set(files), (files, given)
    print("ran", run_dir, json.dumps([one["options"] for one in start]), sorted(rows[-1])[:3], flush=True)


if __name__ == "__main__":
    run_page(Path(sys.argv[1]).read_text(encoding="utf-8"), sys.argv[2:])

"""Draw docs/metrics.md, the reference of what a run logs, from docs/metrics.toml: `./bazelw run //docs:draw_metrics`.

`written` reads the names from the code: keys of dicts, and what is assigned to a key. A test wants a line for each.
"""

import ast
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from runlog.curves import kind_of

HEAD = """# Metrics

What stands in `metrics.jsonl`, a line a step, and goes to TensorBoard and to `--logging.tracker` by the same names. The
third column is the title of its chart in the report, where it has one of its own; other numbers that change have charts
with their names as titles. Drawn from [metrics.toml](metrics.toml), which a test holds to the code. Numbers of your
own: [add-a-metric.md](add-a-metric.md).
"""
PAGE = Path("docs/metrics.md")
NAME = re.compile(r"[a-z_]+(?:/(?:[a-z0-9_]+|\{\}))+")
PLACES = ("libs/schedules/schedules", "libs/objectives/objectives", "libs/engines/engines", "apps/grpo", "apps/sft")
APART = {"testing", "tests", "benchmarks", "proofs", "prove", "recipes", "commands"}
PARTS = {"mismatch/abs", "mismatch/abs/max", "mismatch/weight", "mismatch/weight_square"}
"""Numbers that others are made of, before a step's metrics are."""


def meanings(root: Path) -> dict[str, dict[str, str]]:
    """Return what each metric is, by section."""
    return tomllib.loads((root / "docs/metrics.toml").read_text(encoding="utf-8"))


def page(sections: Mapping[str, Mapping[str, str]]) -> str:
    """Return the text of the page; a metric without a meaning is named in the line of another."""
    lines = [HEAD]
    for title, metrics in sections.items():
        lines += [f"## {title}", "", "| metric | what it is | chart |", "| --- | --- | --- |"]
        for name, meaning in ((name, meaning) for name, meaning in metrics.items() if meaning):
            shown = kind_of(name.replace("{}", "NAME"))
            chart = "" if shown is None else shown.title.replace("{}", "NAME")
            lines.append(f"| `{name}` | {meaning} | {chart} |".replace("{}", "NAME"))
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def written(root: Path) -> dict[str, str]:
    """Return the names of metrics in the code, `{}` for what is filled in, each with a file that writes it."""
    files: dict[str, str] = {}
    for place in PLACES:
        for path in sorted((root / place).rglob("*.py")):
            if not APART & set(path.relative_to(root).parts) and not path.name.endswith("_test.py"):
                own = "train/" if place.startswith("libs/objectives") else ""
                for name in _keys(ast.parse(path.read_text(encoding="utf-8"))):
                    if NAME.fullmatch(name) and name not in PARTS:
                        files.setdefault(own + name, path.relative_to(root).as_posix())
    return files


def unknown(names: Mapping[str, str], sections: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the names that have no line."""
    known = {name for metrics in sections.values() for name in metrics}
    patterns = [re.compile(re.escape(name).replace(r"\{\}", "[^/]+") + r"\Z") for name in known]
    return [name for name in names if not any(pattern.match(name) for pattern in patterns)]


def _keys(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        keys: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            keys = node.keys
        elif isinstance(node, ast.DictComp):
            keys = [node.key]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys = [node.slice]
        for key in keys:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value
            elif isinstance(key, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in key.values)


def main() -> None:
    """Write the page."""
    os.chdir(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    PAGE.write_text(page(meanings(Path())), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()

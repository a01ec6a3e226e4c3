"""Draw docs/readers.md from docs/readers: `python docs/draw_readers.py`.

`questions.json` has each page's questions with their answers and where the code says so. `scores.json` has the readings
in order: what became of each question that was asked ("right", "wrong", or "absent": the reader did not find it), and
by question the words of the page that answer it since then. `tasks.json` has what a newcomer needed for five tasks.
"""

import json
import os
import re
from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCORES = ("right", "wrong", "absent")
HEAD = """# What readers found

Each page has questions of somebody who knows TRL or verl, written from the code and not from the page
([questions](readers/questions.json), with answers and where the code says so). A reader who saw the page alone answered
them; an answer that lacks a part of what was asked counts as not found. What was wrong or not found was then mended on
the page, and a test holds the words of the answer to it ([scores](readers/scores.json)). Then another reader answered
them again, and so after each change of a page.

Drawn by `python docs/draw_readers.py`.

"""


def plain(text: str) -> str:
    """Return a text with single blanks, without the marks of links and code: lines may be broken anew."""
    return " ".join(re.sub(r"\]\([^)]*\)|[\[`*]", "", text).split())


def page_text(root: Path, page: str) -> str:
    """Return the plain text of a page, or of all pages of a folder."""
    path = root / page
    files = sorted(path.glob("*.md")) if path.is_dir() else [path]
    return plain("\n".join(file.read_text(encoding="utf-8") for file in files))


def table(questions: Sequence[Mapping[str, Any]], scores: Mapping[str, Any]) -> str:
    """Return the page's table: a row a page, with the first and the last reading of its questions, then the sum.

    Raises:
        ValueError: a question has no score, or one that is not known.
    """
    readings = [one["scores"] for one in scores["readings"]]
    first, last = dict(ChainMap(*readings)), dict(ChainMap(*reversed(readings)))
    heads = [head for name in ("first", "last") for head in (f"right, {name} reading", "wrong", "not found")]
    lines = ["| page | questions | " + " | ".join(heads) + " | mended |", "| --- |" + " --: |" * (len(heads) + 2)]
    total: Counter[str] = Counter()
    for entry in questions:
        ids = [question["id"] for question in entry["questions"]]
        row = {"questions": len(ids)}
        for number, reading in enumerate((first, last)):
            scores_of_page = [reading.get(one) for one in ids]
            if unknown := [one for one, score in zip(ids, scores_of_page, strict=True) if score not in SCORES]:
                raise ValueError(f"{unknown[0]} has no score of {', '.join(SCORES)}")
            row |= {f"{number} {score}": scores_of_page.count(score) for score in SCORES}
        row["mended"] = sum(one in scores["mended"] for one in ids)
        total.update(row)
        lines.append(_line(f"[{entry['page']}]({os.path.relpath(entry['page'], 'docs')})", row))
    return "\n".join([*lines, _line("all", total)]) + "\n"


def tasks_table(tasks: Mapping[str, Any]) -> str:
    """Return the tasks of a newcomer, a row each: steps and minutes taken, wrong turns, and what was mended then."""
    lines = ["| task | done | steps | time (min) | wrong turns | mended |", "| --- | --- | --: | --: | --- | --- |"]
    for task in tasks["tasks"]:
        done = "yes" if task["done"] else "no"
        cells = [task["task"], done, task["steps"], task["minutes"], "; ".join(task["wrong turns"]), task["mended"]]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return f"\n## Five tasks\n\nThe reader {tasks['reader']}.\n\n" + "\n".join(lines) + "\n"


def _line(name: str, row: Mapping[str, int]) -> str:
    return f"| {name} | " + " | ".join(str(value) for value in row.values()) + " |"


def drawn(root: Path) -> str:
    """Return the page."""
    folder = root / "docs/readers"
    questions, scores, tasks = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("questions", "scores", "tasks")
    )
    return HEAD + table(questions, scores) + tasks_table(tasks)


if __name__ == "__main__":
    ROOT = Path(__file__).parents[1]
    (ROOT / "docs/readers.md").write_text(drawn(ROOT), encoding="utf-8")

"""docs/readers.md is drawn from its files, every question is whole, and mended words stand on their pages."""

import json
from pathlib import Path
from typing import Any

import pytest
from draw_readers import drawn, page_text, plain, table, tasks_table

ROOT = Path(__file__).absolute().parents[1]
QUESTIONS: list[dict[str, Any]] = json.loads((ROOT / "docs/readers/questions.json").read_text())
SCORES: dict[str, Any] = json.loads((ROOT / "docs/readers/scores.json").read_text())
PAGE_OF = {question["id"]: entry["page"] for entry in QUESTIONS for question in entry["questions"]}


def test_the_page_is_drawn_from_the_files() -> None:
    assert (ROOT / "docs/readers.md").read_text() == drawn(ROOT)


def test_every_question_is_whole() -> None:
    every = [question for entry in QUESTIONS for question in entry["questions"]]
    assert len(every) == len(PAGE_OF) > 150
    assert all(question["question"] and question["answer"] and question["source"] for question in every)


@pytest.mark.parametrize("question", SCORES["mended"])
def test_the_words_of_the_answer_stand_on_the_page(question: str) -> None:
    assert plain(SCORES["mended"][question]) in page_text(ROOT, PAGE_OF[question])


def test_a_row_counts_its_page() -> None:
    questions = [{"page": "docs/a.md", "questions": [{"id": "a-1"}, {"id": "a-2"}]}]
    readings = [
        {"name": "first", "scores": {"a-1": "right", "a-2": "absent"}},
        {"name": "again", "scores": {"a-2": "wrong"}},
    ]
    assert table(questions, {"readings": readings, "mended": {"a-2": "word"}}).splitlines()[2:] == [
        "| [docs/a.md](a.md) | 2 | 1 | 0 | 1 | 1 | 1 | 0 | 1 |",
        "| all | 2 | 1 | 0 | 1 | 1 | 1 | 0 | 1 |",
    ]
    with pytest.raises(ValueError, match="a-1 has no score"):
        table(questions, {"readings": [{"name": "first", "scores": {}}], "mended": {}})
    assert plain("the `word`\nof [a page](b.md#c)") == "the word of a page"


def test_a_task_has_its_wrong_turns() -> None:
    task = {"task": "a loss", "done": True, "steps": 3, "minutes": 2, "wrong turns": ["x", "y"], "mended": "z"}
    drawn_table = tasks_table({"reader": "knows TRL", "tasks": [task]})
    assert drawn_table.splitlines()[-1] == "| a loss | yes | 3 | 2 | x; y | z |"

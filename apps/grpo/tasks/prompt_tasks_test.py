import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apps.grpo.config import DataConfig, GrpoConfig
from apps.grpo.tasks.prompt_tasks import PromptTasks, prompt_tasks
from apps.quickstart.tokenizer import build_tokenizer
from rollout import TaskRow
from schedules.sampling.task_state import load_cursor, save_cursor

TOKENIZER = build_tokenizer()


def question(row: TaskRow) -> str:
    text: str = row.data["prompt"].messages[0]["content"]
    return text


def make(config: DataConfig) -> PromptTasks:
    settings = GrpoConfig(max_turns=1, data=config)
    return prompt_tasks(settings, TOKENIZER, lambda reply, reference: float(reply.content == reference))  # type: ignore[arg-type]


def write(path: Path, count: int, answer: Callable[[int], object] = lambda i: str(i)) -> Path:
    path.write_text(
        "".join(json.dumps({"question": f"What is {i}?", "answer": answer(i)}) + "\n" for i in range(count))
    )
    return path


def test_a_file_is_read_through_once_an_epoch_and_held_out_by_its_prompts(tmp_path: Path) -> None:
    config = DataConfig(data=write(tmp_path / "a.jsonl", 200), eval_share=0.2)
    tasks = make(config)
    held_out = {question(task) for task in tasks.held_out()}
    count = 200 - len(held_out)
    assert 20 < len(held_out) < 60
    epoch = [question(task) for task in tasks.tasks(0, count)]
    assert len(set(epoch)) == count
    assert not held_out & set(epoch)
    following = [question(task) for task in tasks.tasks(1, count)]
    assert set(following) == set(epoch)
    assert following != epoch


def test_prompts_of_the_held_out_file_are_not_trained_on(tmp_path: Path) -> None:
    config = DataConfig(data=write(tmp_path / "a.jsonl", 50), eval_data=write(tmp_path / "b.jsonl", 10))
    tasks = make(config)
    assert len(tasks.held_out()) == 10
    assert not {question(t) for t in tasks.held_out()} & {question(t) for t in tasks.tasks(0, 40)}


def test_long_prompts_are_counted_and_too_few_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"question": "x" * (300 if i % 2 else 5) + str(i), "answer": "1"} for i in range(100)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    skipped = make(DataConfig(data=path, max_prompt_tokens=100)).skipped
    assert skipped == {"of more than 100 tokens (--max-prompt-tokens)": 50}
    with pytest.raises(ValueError, match=r"too few.*100 were longer"):
        make(DataConfig(data=path, max_prompt_tokens=3))


def test_a_missing_file_is_the_users_error() -> None:
    with pytest.raises(ValueError, match="no such data file"):
        make(DataConfig(data=Path("nowhere.jsonl")))


def test_a_resumed_run_asks_what_the_first_would_have_asked(tmp_path: Path) -> None:
    """Also where a step asks for another number of prompts than before."""
    config = DataConfig(data=write(tmp_path / "a.jsonl", 50), eval_share=0.2)
    first = make(config)
    for step in range(4):
        first.tasks(step, 7)
    save_cursor(tmp_path, 4, first.cursor(), keep=2)
    again = make(config)
    again.tasks(0, 7)  # what the check before a run looks at
    again.restore(load_cursor(tmp_path, 4))
    assert [again.tasks(step, 11) for step in (4, 5)] == [first.tasks(step, 11) for step in (4, 5)]
    with pytest.raises(ValueError, match=r"no record of where its tasks were after step 3"):
        load_cursor(tmp_path, 3)
    other = make(DataConfig(data=write(tmp_path / "b.jsonl", 40), eval_share=0.2))
    with pytest.raises(ValueError, match="give the data and the seed"):
        other.restore(load_cursor(tmp_path, 4))


def test_only_the_last_cursors_are_kept(tmp_path: Path) -> None:
    for step in range(5):
        save_cursor(tmp_path, step, {"at": step}, keep=1)
    assert [load_cursor(tmp_path, step) for step in (2, 3, 4)] == [{"at": 2}, {"at": 3}, {"at": 4}]
    with pytest.raises(ValueError, match="no record"):
        load_cursor(tmp_path, 1)


def test_a_column_of_images_is_refused_at_load(tmp_path: Path) -> None:
    """Whatever names the columns: without a preset the question alone would be asked."""
    rows = [{"question": f"<image>{i} twice?", "answer": 2 * i, "images": ["x.png"]} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"a.jsonl has 40 bad rows: line 1: it holds images"):
        make(DataConfig(data=tmp_path / "a.jsonl"))


@pytest.mark.parametrize("content", [[{"type": "image"}, {"type": "text", "text": "1+1="}], "plain"])
def test_images_are_refused_at_load(content: Any, tmp_path: Path) -> None:
    """R1: a template may drop them without a word."""
    rows: list[dict[str, Any]] = [
        {"question": [{"role": "user", "content": f"{i}+1="}], "answer": 1} for i in range(40)
    ]
    rows[17]["question"] = [{"role": "user", "content": content}]
    if content == "plain":
        rows[17]["question"][0]["images"] = ["x.png"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"a.jsonl, line 18"):
        make(DataConfig(data=tmp_path / "a.jsonl"))

import json
from pathlib import Path

import pytest

from apps.grpo.config import DataConfig, GrpoConfig
from apps.grpo.tasks import prompt_tasks
from apps.quickstart.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()


def question(task):
    return task.messages[0]["content"]


def make(config):
    settings = GrpoConfig(max_turns=1, data=config)
    return prompt_tasks(settings, TOKENIZER, lambda reply, reference: float(reply.content == reference))


def write(path, count, answer=lambda i: str(i)):
    path.write_text(
        "".join(json.dumps({"question": f"What is {i}?", "answer": answer(i)}) + "\n" for i in range(count))
    )
    return path


def test_a_file_is_read_through_once_an_epoch_and_held_out_by_its_prompts(tmp_path):
    config = DataConfig(data=write(tmp_path / "a.jsonl", 200), eval_share=0.2)
    tasks = make(config)
    held_out = {question(task) for task in tasks.held_out()}
    count = 200 - len(held_out)
    assert 20 < len(held_out) < 60
    epoch = [question(task) for task in tasks.train(0, count)]
    assert len(set(epoch)) == count
    assert not held_out & set(epoch)
    following = [question(task) for task in tasks.train(1, count)]
    assert set(following) == set(epoch)
    assert following != epoch


def test_prompts_of_the_held_out_file_are_not_trained_on(tmp_path):
    config = DataConfig(data=write(tmp_path / "a.jsonl", 50), eval_data=write(tmp_path / "b.jsonl", 10))
    tasks = make(config)
    assert len(tasks.held_out()) == 10
    assert not {question(t) for t in tasks.held_out()} & {question(t) for t in tasks.train(0, 40)}


def test_long_prompts_are_counted_and_too_few_are_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"question": "x" * (300 if i % 2 else 5) + str(i), "answer": "1"} for i in range(100)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    skipped = make(DataConfig(data=path, max_prompt_tokens=100)).skipped
    assert skipped == {"of more than 100 tokens (--max-prompt-tokens)": 50}
    with pytest.raises(ValueError, match=r"too few.*100 were longer"):
        make(DataConfig(data=path, max_prompt_tokens=3))


def test_a_missing_file_is_the_users_error():
    with pytest.raises(ValueError, match="no such data file"):
        make(DataConfig(data=Path("nowhere.jsonl")))

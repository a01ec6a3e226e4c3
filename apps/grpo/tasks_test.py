import asyncio
import json
from pathlib import Path

import pytest

from apps.grpo.config import DataConfig
from apps.grpo.tasks import as_task, make_tasks
from apps.quickstart.arithmetic import addition
from apps.quickstart.tokenizer import build_tokenizer
from rollout.environment import Reply, ToolCall

TOKENIZER = build_tokenizer()


def question(task):
    return task.messages[0]["content"]


def write(path, count, answer=lambda i: str(i)):
    path.write_text(
        "".join(json.dumps({"question": f"What is {i}?", "answer": answer(i)}) + "\n" for i in range(count))
    )
    return path


def test_made_tasks_follow_from_seed_and_step_alone():
    config = DataConfig(eval_prompts=32)
    first, again, other = (make_tasks(config, seed, TOKENIZER) for seed in (0, 0, 1))
    asked = [question(task) for task in first.train(3, 8)]
    assert asked == [question(task) for task in again.train(3, 8)]
    assert asked != [question(task) for task in first.train(4, 8)]
    assert asked != [question(task) for task in other.train(3, 8)]
    assert [question(t) for t in first.held_out] == [question(t) for t in other.held_out]


def test_made_tasks_never_train_on_what_is_held_out():
    tasks = make_tasks(DataConfig(eval_prompts=256), 0, TOKENIZER)
    held_out = {question(task) for task in tasks.held_out}
    trained = {question(task) for step in range(100) for task in tasks.train(step, 64)}
    assert len(held_out) == 256
    assert not held_out & trained


def test_a_file_is_read_through_once_an_epoch_and_held_out_by_its_prompts(tmp_path):
    config = DataConfig(data=write(tmp_path / "a.jsonl", 200), eval_share=0.2)
    tasks = make_tasks(config, 0, TOKENIZER)
    held_out = {question(task) for task in tasks.held_out}
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
    tasks = make_tasks(config, 0, TOKENIZER)
    assert len(tasks.held_out) == 10
    assert not {question(t) for t in tasks.held_out} & {question(t) for t in tasks.train(0, 40)}


def test_long_prompts_are_counted_and_too_few_are_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"question": "x" * (300 if i % 2 else 5) + str(i), "answer": "1"} for i in range(100)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert make_tasks(DataConfig(data=path, max_prompt_tokens=100), 0, TOKENIZER).skipped == 50
    with pytest.raises(ValueError, match=r"too few.*100 were longer"):
        make_tasks(DataConfig(data=path, max_prompt_tokens=3), 0, TOKENIZER)


def test_a_missing_file_is_the_users_error():
    with pytest.raises(ValueError, match="no such data file"):
        make_tasks(DataConfig(data=Path("nowhere.jsonl")), 0, TOKENIZER)


def test_the_calculator_must_be_asked():
    task = as_task(addition(123, 456), "calculator")
    answer = Reply(text="", content="\\boxed{579}")

    async def play(*replies):
        session = task.start()
        return [await session.step(reply) for reply in replies]

    call = Reply(text="", content="", tool_calls=(ToolCall("calculator", '{"expression": "123+456"}'),))
    (guessed,) = asyncio.run(play(answer))
    result, told = asyncio.run(play(call, answer))
    assert guessed.reward == 0.0
    assert result.messages[0]["content"] == "579"
    assert told.reward == 1.0

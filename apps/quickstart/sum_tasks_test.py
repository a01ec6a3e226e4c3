"""Synthetic tasks: a function of seed and step, never what is held out, and a calculator that must be asked."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from apps.grpo.config import DataConfig, GrpoConfig
from apps.quickstart.arithmetic import addition
from apps.quickstart.image_tasks import ImageTasks
from apps.quickstart.sum_tasks import SumTasks, as_task, sum_tasks
from rollout import TaskRow
from rollout.chat.messages import Reply
from rollout.environments.environment import Score
from rollout.seeds import derive_seed
from rollout.tools.tool import ToolCall


def question(row: TaskRow) -> str:
    text: str = row.data["problem"].question
    return text


def tasks(seed: int = 0, **data: Any) -> SumTasks:
    return sum_tasks(GrpoConfig(seed=seed, max_turns=1, data=DataConfig(**data)), "arithmetic")


def test_tasks_follow_from_seed_and_step_alone() -> None:
    first, again, other = (tasks(seed, eval_prompts=32) for seed in (0, 0, 1))
    questions = [question(task) for task in first.tasks(3, 8)]
    assert questions == [question(task) for task in again.tasks(3, 8)]
    assert questions != [question(task) for task in first.tasks(4, 8)]
    assert questions != [question(task) for task in other.tasks(3, 8)]
    assert [question(t) for t in first.held_out()] == [question(t) for t in other.held_out()]


def test_what_is_held_out_is_never_trained_on() -> None:
    prompt_tasks = tasks(eval_prompts=256)
    held_out = {question(task) for task in prompt_tasks.held_out()}
    trained = {question(task) for step in range(100) for task in prompt_tasks.tasks(step, 64)}
    assert len(held_out) == 256
    assert not held_out & trained


def test_a_task_has_one_id_in_every_step_and_run() -> None:
    def look(task: TaskRow) -> str:
        return repr(task.data["problem"])

    def pictures(seed: int) -> ImageTasks:
        return ImageTasks(eval_prompts=32, seed=seed)

    for made in (tasks, pictures):
        rows = [row for seed in (0, 1) for step in range(40) for row in made(seed).tasks(step, 64)]
        rows += made(0).held_out()
        asked, ids = {look(row) for row in rows}, {row.id for row in rows}
        assert len(asked) == len(ids) == len({(look(row), row.id) for row in rows})
        assert len(ids) < len(rows)  # some came twice
    assert [row.id for row in tasks().tasks(0, 2)] == [question(row).rstrip("=") for row in tasks().tasks(0, 2)]


def test_a_task_that_comes_again_is_sampled_anew() -> None:
    rows = [row for step in range(40) for row in tasks().tasks(step, 64)]
    assert len({row.id for row in rows}) < len(rows) == len({row.seed(0) for row in rows})
    assert [row.seed(0) for row in rows] == [row.seed(0) for step in range(40) for row in tasks().tasks(step, 64)]
    third = tasks().tasks(5, 8)[3]
    assert third.seed(7) == derive_seed(7, "task", "step-5/3", 0)  # what the runs on the front page were sampled with


@pytest.mark.parametrize("change", [{"data": Path("x")}, {"prompt_column": "p"}, {"eval_share": 0.2}])
def test_options_of_prompt_files_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"--{next(iter(change)).replace('_', '-')} goes with --recipe math"):
        tasks(**change)


def test_too_few_digits_for_the_held_out_set_are_refused() -> None:
    with pytest.raises(ValueError, match="raise digits"):
        tasks(digits=1)


def test_the_calculator_must_be_asked() -> None:
    task = as_task(addition(123, 456), "calculator")
    answer = Reply(text="", content="\\boxed{579}")

    async def play(*replies: Reply) -> tuple[Any, Score | None]:
        environment = task()
        outcomes = [await environment.step(reply) for reply in replies]
        return outcomes[0].messages, await environment.finish("done")

    call = Reply(text="", content="", tool_calls=(ToolCall("calculator", '{"expression": "123+456"}'),))
    assert asyncio.run(play(answer)) == ((), Score(0.0))
    told, score = asyncio.run(play(call, answer))
    assert told[0]["content"] == "579"
    assert score == Score(1.0)

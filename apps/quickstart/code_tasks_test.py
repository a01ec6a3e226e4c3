"""Functions with a bug: one right operator, a hidden test, and what is told of an attempt, as Python says."""

import asyncio
import itertools
import random

import pytest

from apps.grpo.config import GrpoConfig
from apps.grpo.registry import recipes
from apps.quickstart.broken_code import (
    ATTEMPTS,
    CodeProblem,
    FixCode,
    as_data,
    code_problems,
    program,
    sandbox,
    shown_failure,
)
from apps.quickstart.code_tasks import CodeTasks, demonstrations, make_tasks
from rollout.chat.messages import Reply
from rollout.environments.environment import EpisodeContext, Score, StepResult

PROBLEM = CodeProblem("x+3", "x*3", (4, 7, 5))


def play(problem: CodeProblem, *contents: str) -> tuple[str, list[StepResult], Score]:
    async def main() -> tuple[str, list[StepResult], Score]:
        environment = FixCode()
        shown = await environment.open(EpisodeContext("a", data=as_data(problem)))
        steps = [await environment.step(Reply(content, content)) for content in contents]
        return str(shown.messages[0]["content"]), steps, await environment.finish("done")

    return asyncio.run(main())


def test_a_function_is_repaired_at_the_second_attempt() -> None:
    shown, steps, score = play(PROBLEM, program("x-3"), program("x*3"))
    assert shown == "```python\ndef f(x):\n    return x+3\n```\nassert f(4) == 12\nassert f(7) == 21"
    assert [step.done for step in steps] == [False, True]
    assert steps[0].messages[0]["content"] == "f(4) is 1, not 12"
    assert score == Score(1.0)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("x*4", "f(4) is 16, not 12"),
        ("{4: 12, 7: 21}.get(x, 0)", "f(5) is 0, not 15"),  # the hidden test
        ("x*3.0", "f(4) is no number, not 12"),
        ("y", "NameError: name 'y' is not defined"),
        ("type('A', (int,), {'__eq__': lambda a, b: True})(1)", "f(4) is 1, not 12"),
    ],
)
def test_what_fails_is_told_and_worth_nothing(code: str, told: str) -> None:
    _, steps, score = play(PROBLEM, program(code), *["nothing"] * (ATTEMPTS - 1))
    assert steps[0].messages[0]["content"] == told
    assert steps[-1].done
    assert score == Score(0.0)


def test_the_right_operator_alone_passes_in_the_sandbox_and_outside() -> None:
    for problem in itertools.islice(code_problems(random.Random(0)), 8):
        names = ("+", "-", "*", "//", "%")
        for expression in (f"x{name}{problem.right[-1]}" for name in names):
            _, steps, score = play(problem, program(expression))
            assert (score.reward == 1.0) == (expression == problem.right)
            failure = shown_failure(problem, expression)
            assert failure == (None if steps[0].done else steps[0].messages[0]["content"])
    sandbox().close()


def test_tasks_follow_from_seed_and_step_and_never_are_held_out() -> None:
    first, again, other = (CodeTasks(64, seed) for seed in (0, 0, 1))
    assert first.tasks(3, 8) == again.tasks(3, 8)
    assert first.tasks(3, 8) != first.tasks(4, 8)
    assert first.tasks(3, 8) != other.tasks(3, 8)
    assert first.held_out() == other.held_out()
    held_out = {row.id for row in first.held_out()}
    assert len(held_out) == 64
    assert not held_out & {row.id for step in range(20) for row in first.tasks(step, 64)}


def test_demonstrations_end_in_the_right_function() -> None:
    config = recipes()["quickstart-code"].config
    made = demonstrations(config, 0)
    assert len(made) == config.warm_start.batch_size
    assert {len(one.messages) for one in made} == {2, 4}
    for one in made:
        last, (first, second) = str(one.messages[-1]["content"]), str(one.messages[0]["content"]).split("\n```\n")
        space: dict[str, object] = {}
        exec(last.replace("```python\n", "").replace("```", ""), space)
        exec(second, space)  # the tests that are shown
        assert first.startswith("```python")


def test_one_attempt_repairs_nothing() -> None:
    for turns in (1, ATTEMPTS + 1):
        with pytest.raises(ValueError, match=f"--max-turns must be 2 to {ATTEMPTS}"):
            make_tasks(GrpoConfig(max_turns=turns))

"""The tasks of quickstart-code: functions with a bug, repaired until their tests pass (`broken_code`)."""

import itertools
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from apps.grpo.config import GrpoConfig
from apps.grpo.tasks.prompt_tasks import Conversation
from apps.quickstart.broken_code import (
    ATTEMPTS,
    OPERATORS,
    CodeProblem,
    FixCode,
    as_data,
    code_problems,
    program,
    sandbox,
    shown_failure,
)
from apps.quickstart.sum_tasks import refuse_file_options
from rollout import EnvironmentFactory, TaskRow
from rollout.seeds import derive_seed


@dataclass(frozen=True)
class CodeTasks:
    """Functions with a bug; the held-out ones are the same for every seed, so that runs compare."""

    eval_prompts: int
    seed: int
    skipped: Mapping[str, int] = field(default_factory=dict)
    name: str = "code"

    def tasks(self, step: int, count: int) -> list[TaskRow]:
        """Return the step's problems, none of them held out."""
        return _rows(f"step-{step}", _step_problems(self.seed, step, count))

    def held_out(self) -> list[TaskRow]:
        """Return different problems that are never trained on."""
        different: dict[str, TaskRow] = {}
        for problem in code_problems(random.Random(0), held_out=True):
            if len(different) == self.eval_prompts:
                break
            different.setdefault(problem.question, _row(problem))
        return list(different.values())

    def environment(self, row: TaskRow) -> EnvironmentFactory:
        """Return the environment of a problem, which is the row's data."""
        del row
        return FixCode

    def cursor(self) -> dict[str, Any]:
        """Return nothing: a step's tasks follow from its number."""
        return {}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Do nothing: there is no state."""


def make_tasks(config: GrpoConfig) -> CodeTasks:
    """Return the tasks.

    Raises:
        ValueError: the configuration sets an option of prompt files, or leaves no second attempt.
        SandboxRefusedError: the kernel refuses a sandbox.
    """
    refuse_file_options(config, ("eval_prompts",))
    if not 1 < config.max_turns <= ATTEMPTS:
        raise ValueError(f"--max-turns must be 2 to {ATTEMPTS}: a function is repaired after its tests have failed")
    sandbox().start()
    return CodeTasks(config.data.eval_prompts, config.seed)


def demonstrations(config: GrpoConfig, step: int) -> list[Conversation]:
    """Return the demonstrations of a warm start's step: other problems, half of them repaired at the second attempt."""
    chosen = _step_problems(config.seed + 1, step, config.warm_start.batch_size)
    guesses = random.Random(derive_seed(config.seed + 1, "guesses", step))
    return [Conversation(_demonstration(problem, guesses)) for problem in chosen]


def _demonstration(problem: CodeProblem, guesses: random.Random) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": problem.question}]
    guess = f"x{guesses.choice(tuple(OPERATORS))}{problem.right[-1]}"
    failure = shown_failure(problem, guess)
    if guesses.random() < 0.5 and failure is not None:
        messages += [{"role": "assistant", "content": program(guess)}, {"role": "user", "content": failure}]
    return [*messages, {"role": "assistant", "content": program(problem.right)}]


def _step_problems(seed: int, step: int, count: int) -> list[CodeProblem]:
    return list(itertools.islice(code_problems(random.Random(derive_seed(seed, "code", step))), count))


def _rows(name: str, chosen: Iterable[CodeProblem]) -> list[TaskRow]:
    return [replace(_row(problem), draw=f"{name}/{i}") for i, problem in enumerate(chosen)]


def _row(problem: CodeProblem) -> TaskRow:
    """Return the row of a problem; its id is all of it but the hidden test, in any step of any run."""
    parts = (problem.broken, problem.right, *map(str, problem.arguments))
    return TaskRow(" ".join(parts), as_data(problem))

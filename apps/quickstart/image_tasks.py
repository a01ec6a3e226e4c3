"""The tasks of quickstart-image: pictures that the project draws, counted and read (`apps.quickstart.shapes`)."""

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from apps.common.data.answers import exact_reward
from apps.grpo.config import GrpoConfig
from apps.grpo.tasks.prompt_tasks import Conversation
from apps.quickstart.shapes import ImageProblem, image_problems
from apps.quickstart.sum_tasks import refuse_file_options
from rollout import Reply, Task, TaskRow
from rollout.seeds import derive_seed
from rollout.tools.tool import ToolResult
from rollout.tools.workers import instant


@dataclass(frozen=True)
class ImageTasks:
    """Tasks of a picture and a question; the held-out ones are the same for every seed, so that runs compare."""

    eval_prompts: int
    seed: int
    skipped: Mapping[str, int] = field(default_factory=dict)
    name: str = "pictures"

    def tasks(self, step: int, count: int) -> list[TaskRow]:
        """Return the step's pictures, none of them held out."""
        return _rows(f"step-{step}", _step_problems(self.seed, step, count))

    def held_out(self) -> list[TaskRow]:
        """Return pictures that are never trained on."""
        return [_row(problem) for problem in _held_out(self.eval_prompts)]

    def environment(self, row: TaskRow) -> Task:
        """Return the task of one picture."""
        problem: ImageProblem = row.data["problem"]

        @instant
        def reward(reply: Reply, results: Sequence[ToolResult]) -> float:
            del results
            return exact_reward(reply.content, problem.answer)

        return Task(messages=(_question(problem),), reward=reward)

    def cursor(self) -> dict[str, Any]:
        """Return nothing: a step's tasks follow from its number."""
        return {}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Do nothing: there is no state."""


def make_tasks(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> ImageTasks:
    """Return tasks of one turn; the reward is 1 for the right number in a box, else 0.

    Raises:
        ValueError: the configuration sets an option of prompt files, or does not let the model see.
    """
    del tokenizer
    refuse_file_options(config, ("eval_prompts",))
    if config.max_turns != 1:
        raise ValueError("--max-turns has no effect where no tool can be called: leave it at 1")
    if config.engine.vision == "off":
        raise ValueError("the tasks are pictures: set --trainer.vision to trained or frozen")
    return ImageTasks(config.data.eval_prompts, config.seed)


def demonstrations(config: GrpoConfig, step: int) -> list[Conversation]:
    """Return the demonstrations of step `step` of a warm start: other pictures than those of the GRPO steps."""
    chosen = _step_problems(config.seed + 1, step, config.warm_start.batch_size)
    return [Conversation([_question(p), {"role": "assistant", "content": p.solution}]) for p in chosen]


def _question(problem: ImageProblem) -> dict[str, Any]:
    parts = [{"type": "image", "image": problem.image}, {"type": "text", "text": problem.question}]
    return {"role": "user", "content": parts}


@cache
def _held_out(count: int) -> list[ImageProblem]:
    """Return the first held-out problems: one of many that are drawn."""
    return list(itertools.islice(image_problems(random.Random(0), held_out=True), count))


def _step_problems(seed: int, step: int, count: int) -> list[ImageProblem]:
    return list(itertools.islice(image_problems(random.Random(derive_seed(seed, "pictures", step))), count))


def _rows(name: str, chosen: Iterable[ImageProblem]) -> list[TaskRow]:
    return [replace(_row(problem), draw=f"{name}/{i}") for i, problem in enumerate(chosen)]


def _row(problem: ImageProblem) -> TaskRow:
    """Return the row of a picture; its id is the drawing and the question, in any step of any run."""
    return TaskRow(f"{problem.spec} {problem.question}", {"problem": problem})

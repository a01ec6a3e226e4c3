"""Questions of a file with reference answers, for a real checkpoint: --model DIR --data FILE."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from apps.grpo.config import GrpoConfig
from apps.grpo.recipe import Recipe
from engines import EngineConfig
from rollout import Sampling

if TYPE_CHECKING:  # slow to load, and a command line needs none of it
    from transformers import PreTrainedTokenizerBase

    from apps.grpo.tasks.prompt_tasks import PromptTasks
    from rollout import Reply
    from rollout.rewards.math_answer import MathChecker
    from rollout.tools.tool import ToolResult


class MathReward:
    """The reward of an answer that the reply marks, against the reference's."""

    def __call__(self, reply: Reply, reference: str, row: Mapping[str, Any], results: Sequence[ToolResult]) -> float:
        r"""Return 1.0 where the answer that the reply marks is the reference's, else 0.0.

        Equal numbers are seen at once; the rest is math-verify's to judge: \frac{1}{2} is 0.5, 18\text{ dollars} is 18.
        """
        from apps.common.data.answers import final_answer, same_answer  # slow to load

        del row, results
        answer, expected = final_answer(reply.content or reply.text), final_answer(reference) or reference
        if answer is None:
            return 0.0
        return float(same_answer(answer, expected) or _checker().equal(expected, answer))

    def answer_classes(self, answers: Sequence[str]) -> list[int]:
        """Return the number of each answer's class, for the votes of maj@k: those that are equal as this reward sees
        it."""
        from apps.common.data.evaluation import equal_numbers  # slow to load

        numbers = equal_numbers(answers)
        first = {number: answers[numbers.index(number)] for number in numbers}
        found = dict(zip(first, _checker().classes([*first.values()]), strict=True))
        return [found[number] for number in numbers]


reward = MathReward()


@functools.cache
def _checker() -> MathChecker:
    from rollout.rewards.math_answer import MathChecker  # slow to load

    return MathChecker()


def make_tasks(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> PromptTasks:
    """Return the prompts of the file, scored by --reward where it is given."""
    from apps.common.plugins import load_reward  # slow to load
    from apps.grpo.tasks.prompt_tasks import prompt_tasks  # slow to load

    if config.plugins.reward is not None:
        return prompt_tasks(config, tokenizer, load_reward(config.plugins.reward, config.plugins.reward_options))
    if config.data.data is not None:
        _checker()  # raises where math-verify is not installed; without a file, that is said first
    return prompt_tasks(config, tokenizer, reward)


RECIPE = Recipe(
    config=GrpoConfig(
        recipe="math",
        steps=200,
        prompts_per_step=32,
        group_size=8,
        max_turns=1,
        max_episode_tokens=4096,
        eval_every=20,
        save_every=20,
        engine=EngineConfig(lr=1e-6, warmup_steps=5, gradient_checkpointing=True),
        sampling=Sampling(max_new_tokens=2048),
    ),
    make_tasks=make_tasks,
)

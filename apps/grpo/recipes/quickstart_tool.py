"""Sums with a calculator: the model must learn to call it, and to copy its answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from apps.grpo.config import GrpoConfig, WarmStart
from apps.grpo.recipe import Recipe
from apps.grpo.recipes import quickstart
from engines import EngineConfig
from rollout import Sampling

if TYPE_CHECKING:  # slow to load, and a command line needs none of it
    from transformers import PreTrainedTokenizerBase

    from apps.grpo.tasks.prompt_tasks import Conversation
    from apps.quickstart.sum_tasks import SumTasks


def make_tasks(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> SumTasks:
    """Return sums of two turns, call and answer; a right answer has reward 0 unless the calculator was called."""
    from apps.quickstart.sum_tasks import sum_tasks  # slow to load

    del tokenizer
    return sum_tasks(config, "calculator")


def demonstrations(config: GrpoConfig, step: int) -> list[Conversation]:
    """Return sums that are solved by a call."""
    from apps.quickstart import sum_tasks  # slow to load

    return sum_tasks.demonstrations(config, step, "calculator")


RECIPE = Recipe(
    config=replace(
        quickstart.RECIPE.config,
        recipe="quickstart-tool",
        steps=50,
        prompts_per_step=48,
        eval_every=10,
        save_every=25,
        max_turns=2,
        max_episode_tokens=160,
        warm_start=WarmStart(
            steps=1500, until_accuracy=0.5, eval_every=5, eval_prompts=64, batch_size=32, lr=6e-3, warmup_steps=30
        ),
        engine=EngineConfig(device="cpu", lr=8e-4, warmup_steps=5),
        # Cooler than 1: one wrong digit of a copied number spoils an episode of 20 sampled tokens.
        sampling=Sampling(max_new_tokens=24, temperature=0.6),
    ),
    make_tasks=make_tasks,
    make_model=quickstart.make_model,
    demonstrations=demonstrations,
)

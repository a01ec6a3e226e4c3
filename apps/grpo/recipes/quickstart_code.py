"""Functions with a bug: the model must read their tests, and what a sandbox says of its attempts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from apps.grpo.config import DataConfig, GrpoConfig, WarmStart
from apps.grpo.recipe import Recipe
from apps.grpo.recipes import quickstart
from engines import EngineConfig
from rollout import Sampling

if TYPE_CHECKING:  # slow to load, and a command line needs none of it
    from transformers import PreTrainedTokenizerBase

    from apps.grpo.tasks.prompt_tasks import Conversation
    from apps.quickstart.code_tasks import CodeTasks


def make_tasks(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> CodeTasks:
    """Return functions to repair, in as many attempts as `max_turns`; the reward is 1 once all tests pass, else 0."""
    from apps.quickstart import code_tasks  # slow to load

    del tokenizer
    return code_tasks.make_tasks(config)


def make_model(directory: Path, seed: int) -> Path:
    """Return the directory, with a tiny Qwen3.5 to which the fixed parts of a function are one token each."""
    from apps.quickstart.model import ensure_tiny_model  # slow to load
    from apps.quickstart.tokenizer import CODE_WORDS, WORDS  # the same

    return ensure_tiny_model(directory, seed, words=(*WORDS, *CODE_WORDS))


def demonstrations(config: GrpoConfig, step: int) -> list[Conversation]:
    """Return functions that are repaired at once, or after a wrong guess."""
    from apps.quickstart import code_tasks  # slow to load

    return code_tasks.demonstrations(config, step)


RECIPE = Recipe(
    config=replace(
        quickstart.RECIPE.config,
        recipe="quickstart-code",
        data=DataConfig(eval_prompts=192),
        steps=60,
        prompts_per_step=24,
        eval_every=10,
        save_every=30,
        max_turns=2,
        max_episode_tokens=128,
        warm_start=WarmStart(
            steps=800, until_accuracy=0.35, eval_every=10, eval_prompts=64, batch_size=48, lr=6e-3, warmup_steps=30
        ),
        engine=EngineConfig(
            device="cpu", lr=1e-3, warmup_steps=5, lr_schedule="linear", total_steps=60, min_lr_ratio=0.1
        ),
        sampling=Sampling(max_new_tokens=12),
    ),
    make_tasks=make_tasks,
    make_model=make_model,
    demonstrations=demonstrations,
)

"""Two-digit sums: a tiny model made on the spot learns them on a CPU core within two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from apps.grpo.config import DataConfig, GrpoConfig, WarmStart
from apps.grpo.recipe import Recipe
from engines import EngineConfig
from rollout import Sampling

if TYPE_CHECKING:  # slow to load, and a command line needs none of it
    from transformers import PreTrainedTokenizerBase

    from apps.grpo.tasks.prompt_tasks import Conversation
    from apps.quickstart.sum_tasks import SumTasks


def make_tasks(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> SumTasks:
    """Return sums of one turn; the reward is 1 for the right number in a box, else 0 (`apps.quickstart.sum_tasks`)."""
    from apps.quickstart.sum_tasks import sum_tasks  # slow to load

    del tokenizer
    return sum_tasks(config, "arithmetic")


def make_model(directory: Path, seed: int) -> Path:
    """Return the directory, with a tiny Qwen3.5."""
    from apps.quickstart.model import ensure_tiny_model  # slow to load

    return ensure_tiny_model(directory, seed)


def demonstrations(config: GrpoConfig, step: int) -> list[Conversation]:
    """Return solved sums."""
    from apps.quickstart import sum_tasks  # slow to load

    return sum_tasks.demonstrations(config, step, "arithmetic")


RECIPE = Recipe(
    config=GrpoConfig(
        recipe="quickstart",
        data=DataConfig(digits=2),
        steps=120,
        prompts_per_step=64,
        group_size=8,
        max_turns=1,
        max_episode_tokens=64,
        eval_every=40,
        save_every=60,
        warm_start=WarmStart(
            steps=800, until_accuracy=0.45, eval_every=5, eval_prompts=256, batch_size=64, lr=4e-3, warmup_steps=30
        ),
        # From 2e-3 the reward falls at once; from 1e-3 it does where samples are a step old.
        engine=EngineConfig(
            device="cpu", lr=8e-4, warmup_steps=10, lr_schedule="linear", total_steps=120, min_lr_ratio=0.1
        ),
        sampling=Sampling(max_new_tokens=7),
    ),
    make_tasks=make_tasks,
    make_model=make_model,
    demonstrations=demonstrations,
)

"""Environments of your own: --environment FILE.py:NAME, with --model DIR, or with a tiny model to try them on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from apps.grpo.config import GrpoConfig
from apps.grpo.recipe import Recipe
from apps.grpo.recipes import quickstart
from engines import EngineConfig
from rollout import Sampling

if TYPE_CHECKING:  # slow to load, and a command line needs none of it
    from transformers import PreTrainedTokenizerBase

    from apps.common.tasks import Tasks


def make_tasks(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> Tasks:
    """Return the tasks of the named environments, with the system prompt where there is one."""
    from apps.grpo.tasks.environment_tasks import make_environment_tasks  # slow to load
    from rollout.environments.system_prompt import SystemPrompt  # slow to load

    del tokenizer
    text = config.plugins.system_prompt
    return make_environment_tasks(config, None if text is None else SystemPrompt(text))


RECIPE = Recipe(
    config=GrpoConfig(
        recipe="environment",
        steps=200,
        prompts_per_step=32,
        group_size=8,
        max_turns=8,
        max_episode_tokens=2048,
        eval_every=20,
        save_every=20,
        engine=EngineConfig(lr=1e-6, warmup_steps=5, gradient_checkpointing=True),
        sampling=Sampling(max_new_tokens=512),
    ),
    make_tasks=make_tasks,
    make_model=quickstart.make_model,
)

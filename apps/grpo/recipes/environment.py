"""Environments of your own: --environment FILE.py:NAME, with --model DIR, or with a tiny model to try them on."""

from transformers import PreTrainedTokenizerBase

from apps.grpo.config import GrpoConfig
from apps.grpo.recipe import Recipe
from apps.grpo.tasks.environment_tasks import make_environment_tasks
from apps.quickstart.model import ensure_tiny_model
from engines import EngineConfig
from rollout import Sampling
from rollout.environments.mixed_tasks import EnvironmentTasks
from rollout.environments.system_prompt import SystemPrompt


def make_tasks(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> EnvironmentTasks:
    """Return the tasks of the named environments, with the system prompt where there is one."""
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
    make_model=ensure_tiny_model,
)

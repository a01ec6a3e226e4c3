"""A recipe for tests of whole runs: an untrained model earns some of its reward, so that weights move from step one."""

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from apps.common.prompts import Prompt
from apps.grpo.config import GrpoConfig, WarmStart
from apps.grpo.recipe import Recipe
from apps.grpo.recipes import quickstart
from apps.grpo.tasks import PromptTasks
from apps.quickstart.model import ensure_tiny_model
from engines import EngineConfig
from rollout import Reply


def reward(reply: Reply, reference: str) -> float:
    """The share of the reply's characters that are letters or digits of ASCII, plus 1 for beginning with `reference`."""
    plain = sum(letter.isascii() and letter.isalnum() for letter in reply.text)
    return plain / max(1, len(reply.text)) + float(reply.text.startswith(reference))


def make_tasks(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> PromptTasks:
    """Prompts of different lengths, so that ranks and micro-batches have different work."""
    del tokenizer
    prompts = [
        Prompt(({"role": "user", "content": "say " + str(i) * (1 + i % 9)},), str(i), i)
        for i in range(64 + config.data.eval_prompts)
    ]
    held_out = tuple(prompts[: config.data.eval_prompts])
    return PromptTasks(tuple(prompts[config.data.eval_prompts :]), held_out, reward, config.seed)


RECIPE = Recipe(
    config=replace(
        quickstart.RECIPE.config,
        steps=4,
        prompts=4,
        group_size=4,
        eval_every=2,
        save_every=2,
        data=replace(quickstart.RECIPE.config.data, eval_prompts=8),
        warm_start=WarmStart(steps=0),
        engine=EngineConfig(device="cpu", lr=3e-3),
    ),
    make_tasks=make_tasks,
    make_model=ensure_tiny_model,
    demonstrations=quickstart.RECIPE.demonstrations,
)

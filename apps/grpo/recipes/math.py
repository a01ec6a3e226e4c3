"""Questions of a file with reference answers, for a real checkpoint: --model DIR --data FILE."""

from transformers import PreTrainedTokenizerBase

from apps.common.answers import exact_reward
from apps.grpo.config import GrpoConfig
from apps.grpo.recipe import Recipe
from apps.grpo.tasks import PromptTasks, prompt_tasks
from engines import EngineConfig
from rollout import Reply, Sampling


def reward(reply: Reply, reference: str) -> float:
    """1.0 where the answer that the reply marks equals the reference's, else 0.0."""
    return exact_reward(reply.content or reply.text, reference)


def make_tasks(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> PromptTasks:
    """The file's prompts, one turn each."""
    return prompt_tasks(config, tokenizer, reward)


RECIPE = Recipe(
    config=GrpoConfig(
        recipe="math",
        steps=200,
        prompts=32,
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

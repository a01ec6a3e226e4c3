"""A recipe for tests of whole runs: an untrained model earns some of its reward, so that weights move from step one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from apps.grpo.config import GrpoConfig, WarmStart
from apps.grpo.recipe import Recipe
from apps.grpo.recipes import quickstart
from apps.quickstart.model import ensure_tiny_model
from engines import EngineConfig
from rollout import Environment, Outcome, Reply
from rollout.environment import Message
from rollout.tools import Tool


@dataclass(frozen=True)
class Babble:
    """Talk about a number, as many turns as there may be; a turn earns the share of its characters that are ASCII."""

    number: int

    @property
    def messages(self) -> Sequence[Message]:
        """Prompts of different lengths, so that ranks and micro-batches have different work."""
        return ({"role": "user", "content": "say " + str(self.number) * (1 + self.number % 9)},)

    @property
    def tools(self) -> Sequence[Tool]:
        """None."""
        return ()

    def start(self) -> "Babble":
        """Itself: an episode has no state."""
        return self

    async def step(self, reply: Reply) -> Outcome:
        """Score the reply to a quarter, cut off or not, and ask for more."""
        share = sum(map(str.isascii, reply.text)) / max(1, len(reply.text))
        return Outcome(messages=({"role": "user", "content": "more"},), reward=round(4 * share) / 4, done=False)


@dataclass(frozen=True)
class BabbleTasks:
    """Numbers to talk about: step by step upwards, the held-out ones below all."""

    eval_prompts: int
    skipped: Mapping[str, int] = field(default_factory=dict)

    def train(self, step: int, count: int) -> Sequence[Environment]:
        """The next numbers."""
        return [Babble(self.eval_prompts + step * count + i) for i in range(count)]

    def held_out(self) -> Sequence[Environment]:
        """The first numbers."""
        return [Babble(i) for i in range(self.eval_prompts)]


def make_tasks(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> BabbleTasks:
    """As many held-out numbers as asked for."""
    del tokenizer
    return BabbleTasks(config.data.eval_prompts)


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

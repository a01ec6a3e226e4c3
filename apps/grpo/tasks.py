"""What is asked in a run: environments for training, by step, and the held-out ones, never mixed."""

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jinja2
from transformers import PreTrainedTokenizerBase

from apps.common.prompts import Prompt, read_prompts
from apps.common.split import held_out_keys
from apps.grpo.config import DataConfig, GrpoConfig
from rollout import Environment, Reply, Task
from rollout.episode import derive_seed
from rollout.tools import ToolResult


@dataclass(frozen=True)
class Conversation:
    """A worked example: its messages, and the tools (their schemas) that the model is told of."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


class Tasks(Protocol):
    """The tasks of a run. They are handed to every rank: picklable where there is more than one."""

    @property
    def skipped(self) -> Mapping[str, int]:
        """How many rows of the data were left out, by reason."""
        ...

    def train(self, step: int, count: int) -> Sequence[Environment]:
        """That step's tasks, `count` of them, the same at every call."""
        ...

    def held_out(self) -> Sequence[Environment]:
        """The tasks of evaluations, the same at every call; none of them is trained on."""
        ...


@dataclass(frozen=True)
class PromptTasks:
    """Prompts with reference answers, one turn each; `reward(reply, reference)` scores it."""

    prompts: tuple[Prompt, ...]
    held_out_prompts: tuple[Prompt, ...]
    reward: Callable[[Reply, str], float]
    seed: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)

    def train(self, step: int, count: int) -> Sequence[Environment]:
        """The next prompts of an endless pass over all, shuffled anew for every epoch."""
        size = len(self.prompts)
        places = (divmod(n, size) for n in range(step * count, (step + 1) * count))
        return [self._task(self.prompts[_order(self.seed, epoch, size)[place]]) for epoch, place in places]

    def held_out(self) -> Sequence[Environment]:
        """One task a held-out prompt."""
        return [self._task(prompt) for prompt in self.held_out_prompts]

    def _task(self, prompt: Prompt) -> Task:
        def reward(reply: Reply, results: Sequence[ToolResult]) -> float:
            del results
            return self.reward(reply, prompt.reference)

        return Task(messages=prompt.messages, reward=reward)


def prompt_tasks(
    settings: GrpoConfig, tokenizer: PreTrainedTokenizerBase, reward: Callable[[Reply, str], float]
) -> PromptTasks:
    """Tasks from the files that the configuration names, each read once.

    Prompts that are longer than `max_prompt_tokens`, and those that the held-out file asks too, are left out and
    counted.

    Raises:
        ValueError: no file is named, one can't be used, too little is left (see `apps.common.prompts`), or an option
            has no effect on prompts of one turn.
    """
    config = settings.data
    if config.data is None:
        raise ValueError(f"recipe {settings.recipe!r} asks the prompts of a file: add --data FILE")
    if config.digits != DataConfig.digits:
        raise ValueError("--digits is of the quickstarts' synthetic tasks: leave it out with --data")
    if settings.max_turns != 1:
        raise ValueError("--max-turns has no effect where no tool can be called: leave it at 1")
    if config.max_prompt_tokens >= settings.max_episode_tokens:
        raise ValueError(
            f"--max-prompt-tokens {config.max_prompt_tokens} must be below --max-episode-tokens "
            f"{settings.max_episode_tokens}, which counts the answer too"
        )
    prompts, long = _short(config.data, config, tokenizer)
    if config.eval_data is not None:
        held_out, long_held_out = _short(config.eval_data, config, tokenizer)
        asked, long = {_key(prompt) for prompt in held_out}, long + long_held_out
    else:
        asked = held_out_keys(map(_key, prompts), config.eval_share)
        held_out = [prompt for prompt in prompts if _key(prompt) in asked]
    train = [prompt for prompt in prompts if _key(prompt) not in asked]
    if not train or not held_out:
        raise ValueError(
            f"{config.data}: {len(train)} prompts to train on and {len(held_out)} held out are too few "
            f"({long} were longer than --max-prompt-tokens {config.max_prompt_tokens})"
        )
    skipped = {
        f"of more than {config.max_prompt_tokens} tokens (--max-prompt-tokens)": long,
        "of --data that --eval-data holds too": len(prompts) - len(train) if config.eval_data is not None else 0,
    }
    return PromptTasks(
        prompts=tuple(train),
        held_out_prompts=tuple(held_out[: config.eval_prompts]),
        reward=reward,
        seed=settings.seed,
        skipped={reason: count for reason, count in skipped.items() if count},
    )


def _short(path: Path, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Prompt], int]:
    """The prompts of a file that have at most `max_prompt_tokens` tokens, and how many have more."""
    prompts = read_prompts(path, config.prompt_column, config.answer_column)
    texts = [_render(path, prompt, tokenizer) for prompt in prompts]
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    kept = [p for p, length in zip(prompts, lengths, strict=True) if length <= config.max_prompt_tokens]
    return kept, len(prompts) - len(kept)


def _render(path: Path, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        return str(tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True))
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise ValueError(f"{path}, row {prompt.row}: the chat template refuses the prompt: {error}") from error


def _key(prompt: Prompt) -> str:
    return repr([(message["role"], message["content"]) for message in prompt.messages])


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, size: int) -> list[int]:
    return random.Random(derive_seed(seed, "epoch", epoch)).sample(range(size), size)

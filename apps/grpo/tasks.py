"""What is asked in a run: environments for training, by step, and the held-out ones, never mixed."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from apps.common.answers import exact_reward
from apps.common.prompts import Prompt, read_prompts, split_by_length
from apps.common.split import held_out_keys
from apps.grpo.config import DataConfig
from apps.quickstart.arithmetic import Problem, distinct, problems
from rollout import Reply, Task, calculator
from rollout.episode import derive_seed
from rollout.tools import ToolResult


@dataclass(frozen=True)
class Tasks:
    """`train(step, count)` gives that step's tasks, the same at every call; `held_out` is fixed for the run."""

    train: Callable[[int, int], list[Task]]
    held_out: tuple[Task, ...]
    skipped: int = 0
    """Prompts of the files that were longer than the limit."""


def make_tasks(config: DataConfig, seed: int, tokenizer: PreTrainedTokenizerBase) -> Tasks:
    """The tasks of a run.

    Raises:
        ValueError: the files can't be used, or too little is left of them; see `apps.common.prompts`.
    """
    return _from_files(config, seed, tokenizer) if config.data is not None else _made(config, seed)


def made_problems(config: DataConfig, seed: int) -> Callable[[int, int], list[Problem]]:
    """The made task's training problems of a step, a function of seed and step alone."""

    def train(step: int, count: int) -> list[Problem]:
        return list(
            itertools.islice(problems(random.Random(derive_seed(seed, "problems", step)), config.digits), count)
        )

    return train


def as_task(problem: Problem, task: str) -> Task:
    """A problem as an environment; with the calculator, an answer counts only if the calculator was asked."""

    def reward(reply: Reply, results: Sequence[ToolResult]) -> float:
        asked = task != "calculator" or any(result.ok for result in results)
        return exact_reward(reply.content, problem.answer) if asked else 0.0

    tools = (calculator(),) if task == "calculator" else ()
    return Task(messages=({"role": "user", "content": problem.question},), reward=reward, tools=tools)


def _made(config: DataConfig, seed: int) -> Tasks:
    # The held-out set is the same for every seed, so that runs can be compared.
    held_out = distinct(problems(random.Random(0), config.digits, held_out=True), config.eval_prompts)
    train = made_problems(config, seed)
    return Tasks(
        train=lambda step, count: [as_task(problem, config.task) for problem in train(step, count)],
        held_out=tuple(as_task(problem, config.task) for problem in held_out),
    )


def _from_files(config: DataConfig, seed: int, tokenizer: PreTrainedTokenizerBase) -> Tasks:
    assert config.data is not None
    train, skipped = _short(read_prompts(config.data, config.prompt_column, config.answer_column), config, tokenizer)
    if config.eval_data is not None:
        held_out, more = _short(
            read_prompts(config.eval_data, config.prompt_column, config.answer_column), config, tokenizer
        )
    else:
        chosen = held_out_keys(map(_key, train), config.eval_share)
        held_out, more = [prompt for prompt in train if _key(prompt) in chosen], 0
    asked = {_key(prompt) for prompt in held_out}
    train = [prompt for prompt in train if _key(prompt) not in asked]
    if not train or not held_out:
        raise ValueError(
            f"{config.data}: {len(train)} prompts to train on and {len(held_out)} held out are too few "
            f"({skipped + more} were longer than --max-prompt-tokens {config.max_prompt_tokens})"
        )
    order = _shuffled_forever(train, seed)
    return Tasks(
        train=lambda step, count: [_prompt_task(order(step * count + i)) for i in range(count)],
        held_out=tuple(_prompt_task(prompt) for prompt in held_out[: config.eval_prompts]),
        skipped=skipped + more,
    )


def _short(prompts: list[Prompt], config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Prompt], int]:
    texts = [
        tokenizer.apply_chat_template(list(p.messages), tokenize=False, add_generation_prompt=True) for p in prompts
    ]
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    kept, skipped = split_by_length(prompts, lengths, config.max_prompt_tokens)
    return kept, len(skipped)


def _key(prompt: Prompt) -> str:
    return repr([(message["role"], message["content"]) for message in prompt.messages])


def _shuffled_forever(prompts: list[Prompt], seed: int) -> Callable[[int], Prompt]:
    """The n-th prompt of an endless pass over the file, shuffled anew for every epoch."""
    orders: dict[int, list[int]] = {}

    def nth(n: int) -> Prompt:
        epoch, position = divmod(n, len(prompts))
        if epoch not in orders:
            orders.clear()
            orders[epoch] = random.Random(derive_seed(seed, "epoch", epoch)).sample(range(len(prompts)), len(prompts))
        return prompts[orders[epoch][position]]

    return nth


def _prompt_task(prompt: Prompt) -> Task:
    return Task(
        messages=prompt.messages,
        reward=lambda reply, _: exact_reward(reply.content or reply.text, prompt.reference),
    )

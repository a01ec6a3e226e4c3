"""The tasks of a run: environments for training, by step, and the held-out ones, never mixed."""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from apps.common.data.held_out import held_out_keys
from apps.common.data.prompts import Prompt, for_each, read_prompts
from apps.common.data.template_options import template_options
from apps.common.plugins import RowReward, Scored, load_tools
from apps.grpo.config import DataConfig, GrpoConfig
from apps.grpo.tasks.prompt_files import layout
from engines.media.image_reader import ImageReader, as_text
from engines.weights.hub import model_directory
from rollout import Reply, RowSource, Task, TaskRow
from rollout.chat.chat import MEDIA_KEYS, check_text_only
from rollout.chat.images import images_of, without_image_parts, without_images
from rollout.environments.system_prompt import with_system_prompt
from rollout.tools.tool import ToolResult
from seqpack.batches.mrope import grid_tokens

IMAGE_MARK = "<image>"


@dataclass(frozen=True)
class Conversation:
    """A demonstration: its messages, and the schemas of the tools that the model is shown, both as JSON."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


class PromptTasks(RowSource):
    """Prompts with reference answers. A turn that calls one of `tools` gets the result, the first without a call is
    scored.

    A row's data is its prompt (`apps.common.data.prompts.Prompt`), its id the prompt's row in its file. Tools are named
    by their specs, so that other processes can load them.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt],
        reward: RowReward,
        seed: int = 0,
        skipped: Mapping[str, int] | None = None,
        held_out_name: str = "row",
        tools: Sequence[str] = (),
        tool_options: Sequence[str] = (),
    ) -> None:
        rows = [TaskRow(f"row-{prompt.row}", {"prompt": prompt}) for prompt in prompts]
        super().__init__("prompts", rows, [TaskRow(f"{held_out_name}-{p.row}", {"prompt": p}) for p in held_out], seed)
        self.reward = reward
        self.skipped = dict(skipped or {})
        self._tools, self._tool_options = tuple(tools), tuple(tool_options)
        self._takes_end = bool(getattr(reward, "takes_end", False))

    def all_held_out(self, count: int) -> "PromptTasks":
        """Return tasks whose held-out prompts are the first `count` of all, in the order of their file."""
        others = copy.copy(self)
        rows = sorted([*self._rows, *self._held_out], key=lambda row: row.data["prompt"].row)
        others._held_out = tuple(rows[:count])
        return others

    @property
    def prompts(self) -> Mapping[str, Prompt]:
        """The prompts that are trained on, by the key of their row."""
        return {row.key: row.data["prompt"] for row in self._rows}

    @property
    def held_out_metric(self) -> str | None:
        """What the reward declares that its mean is called; None: nothing."""
        return getattr(self.reward, "held_out_metric", None)

    def environment(self, row: TaskRow) -> Task:
        """Return the task of a row, scored against its reference."""
        prompt = row.data["prompt"]
        score: Callable[..., Scored] = self.reward

        def reward(reply: Reply, results: Sequence[ToolResult], **options: Any) -> Scored:
            return score(reply, prompt.reference, prompt.columns, results, **options)

        return Task(
            messages=prompt.messages,
            reward=reward,
            tools=load_tools(self._tools, self._tool_options),
            cut_off_reward=None if self._takes_end else 0.0,
            reward_takes_end=self._takes_end,
        )


def prompt_tasks(settings: GrpoConfig, tokenizer: PreTrainedTokenizerBase, reward: RowReward) -> PromptTasks:
    """Return tasks from the files that the configuration names, each read once.

    Prompts longer than `max_prompt_tokens`, and those that the held-out file has too, are left out and counted.

    Raises:
        ValueError: no file is named, one can't be used, too little is left (see `apps.common.data.prompts`), or an
            option has no effect on prompts.
    """
    config = settings.data
    if config.data is None:
        raise ValueError(
            f"recipe {settings.recipe!r} asks the prompts of a file: add --data FILE, or name --recipe quickstart"
        )
    if config.digits != DataConfig.digits:
        raise ValueError("--digits is of the quickstarts' synthetic tasks: leave it out with --data")
    if settings.plugins.environment:
        raise ValueError("--environment goes with --recipe environment, and without --data")
    if settings.plugins.tool and settings.max_turns == 1:
        raise ValueError("--tool can't be called in one turn: raise --max-turns, which counts the answer too")
    if not settings.plugins.tool and settings.max_turns != 1:
        raise ValueError("--max-turns has no effect where no tool can be called: leave it at 1, or add --tool")
    if config.max_prompt_tokens >= settings.max_episode_tokens:
        raise ValueError(
            f"--max-prompt-tokens {config.max_prompt_tokens} must be below --max-episode-tokens "
            f"{settings.max_episode_tokens}, which counts the answer too"
        )
    prompts, long = _short(config.data, settings, tokenizer)
    if config.eval_data is not None:
        held_out, long_held_out = _short(config.eval_data, settings, tokenizer)
        excluded, long = {_key(prompt) for prompt in held_out}, long + long_held_out
    else:
        excluded = held_out_keys(map(_key, prompts), config.eval_share, config.eval_prompts)
        held_out = [prompt for prompt in prompts if _key(prompt) in excluded]
    train = [prompt for prompt in prompts if _key(prompt) not in excluded]
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
        prompts=train,
        held_out=held_out[: config.eval_prompts],
        reward=reward,
        seed=settings.seed,
        skipped={reason: count for reason, count in skipped.items() if count},
        held_out_name="row" if config.eval_data is None else "eval-row",
        tools=settings.plugins.tool,
        tool_options=settings.plugins.tool_options,
    )


def _short(path: Path, settings: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Prompt], int]:
    """Return the prompts of a file with at most `max_prompt_tokens` tokens, and the number of longer ones."""
    config, own = settings.data, settings.plugins
    prompt_column, answer_column, system_prompt = layout(settings)
    prompts = read_prompts(path, prompt_column, answer_column)
    sees = settings.engine.vision != "off"
    prompts = for_each(path, prompts, lambda p: _with_images(p, settings.cluster.media.images_column, sees))
    if system_prompt is not None:
        prompts = [replace(prompt, messages=_prompted(prompt, system_prompt)) for prompt in prompts]
    schemas = [tool.schema for tool in load_tools(own.tool, own.tool_options)]
    options = template_options(own.template_options)
    texts = for_each(path, prompts, lambda prompt: _render(prompt, tokenizer, schemas, options, sees))
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    if sees:
        lengths = _with_image_tokens(path, settings, prompts, lengths)
    short = [p for p, length in zip(prompts, lengths, strict=True) if length <= config.max_prompt_tokens]
    return short, len(prompts) - len(short)


def _with_images(prompt: Prompt, named: str | None, sees: bool) -> Prompt:
    """Return a row with the images of its column in its question: where it says <image>, or else before it.

    `named`: that column where it was named, which every row then has; else `images`, which it may have.

    Raises:
        ValueError: it holds media that the model doesn't see, or another number of marks, or images in both places.
    """
    column = named or "images"
    if named is not None and named not in prompt.columns:
        raise ValueError(
            f"no column {named!r}; it has {', '.join(prompt.columns)}. Name the column of images with "
            "--media.images-column"
        )
    images = prompt.columns.get(column) or ()
    if not isinstance(images, list | tuple):
        images = (images,)
    if any(prompt.columns.get(name) for name in MEDIA_KEYS if name != column) or (images and not sees):
        raise ValueError(
            "it holds images or other media: leave such rows out, or set --trainer.vision to trained or frozen for a "
            "model that sees images"
        )
    if not images:
        return prompt
    question = prompt.messages[-1]["content"]
    if not isinstance(question, str):
        raise ValueError("it has a column of images and a question of parts: keep one of the two")
    texts = question.split(IMAGE_MARK) if IMAGE_MARK in question else [*[""] * len(images), question]
    if len(texts) != len(images) + 1:
        raise ValueError(f"it has {len(images)} images for {len(texts) - 1} {IMAGE_MARK}")
    parts: list[dict[str, Any]] = [{"type": "text", "text": texts[0]}]
    for image, text in zip(images, texts[1:], strict=True):
        parts += [{"type": "image", "image": _for_other_processes(as_text(image))}, {"type": "text", "text": text}]
    turn = {"role": "user", "content": [part for part in parts if part.get("text") != ""]}
    return replace(prompt, messages=(*prompt.messages[:-1], turn))


def _for_other_processes(image: str) -> str:
    """Return an image as a process with another working directory finds it, such as an actor of Ray."""
    return image if image.startswith("data:") else os.path.abspath(image)


def _with_image_tokens(
    path: Path, settings: GrpoConfig, prompts: Sequence[Prompt], lengths: Sequence[int]
) -> list[int]:
    """Return the lengths of prompts with their images' tokens, of which the headers are read."""
    if settings.model is None:
        raise ValueError("images need a model that sees them: add --model DIR")
    reader = ImageReader.of(model_directory(settings.model))

    def more(prompt: Prompt) -> int:
        images = images_of(prompt.messages)
        return sum(grid_tokens(grid, reader.merge_size) - 1 for grid in reader.grids(images).tolist())

    return [length + added for length, added in zip(lengths, for_each(path, prompts, more), strict=True)]


def _prompted(prompt: Prompt, system_prompt: str) -> tuple[dict[str, Any], ...]:
    return tuple(dict(message) for message in with_system_prompt(prompt.messages, system_prompt))


def _render(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    sees: bool,
) -> str:
    check_text_only([without_image_parts(m) for m in prompt.messages] if sees else prompt.messages)
    try:
        return str(
            tokenizer.apply_chat_template(
                without_images(prompt.messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **options,
            )
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise ValueError(f"the chat template refuses the prompt: {error}") from error


def _key(prompt: Prompt) -> str:
    """Return a prompt's text and images as a key, so that equal questions are never on both sides."""
    return repr([(message["role"], message["content"]) for message in prompt.messages])

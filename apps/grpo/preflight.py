"""Checks that refuse what will fail, before a process is started or a token sampled."""

import asyncio
import re
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from apps.common.cli.certificates import CheckedModel, open_checked
from apps.common.cli.flags import flag
from apps.common.cli.refusals import Refusals
from apps.common.data.model_files import longest_sequence, made_for_checks
from apps.common.data.template_options import template_options
from apps.common.data.tokenizer import load_tokenizer
from apps.common.ray_devices import check_ray_devices
from apps.common.tasks import Tasks
from apps.grpo.config import GrpoConfig
from apps.grpo.recipe import Recipe
from apps.grpo.registry import spec_of
from apps.grpo.sampling.chat import chat_of, tool_format_of
from apps.grpo.tasks.privileged import check_privileged
from apps.grpo.tasks.prompt_files import data_problems
from apps.grpo.teachers import check_teachers
from chat_tools import formats
from engines.capability import unsupported
from engines.loading import resolve_device
from engines.preflight import refusals as model_refusals
from rollout import EpisodeContext, Observation, TaskRow
from rollout.environments.thread_environment import host
from rollout.length_limit import REASON, longest_of_one_table
from schedules.ray.cluster import ray_module
from schedules.sampling.session import declared_metric

T = TypeVar("T")


def check_machine(config: GrpoConfig) -> None:
    """Raise ValueError for an engine or a device that is missing; ranks and lengths are the plan's (`runplan`).

    Raises:
        SettingsError: with the settings to change, all of them.
    """
    refusals = Refusals()
    refusals.lines += unsupported(config.engine)
    device = refusals.of(partial(resolve_device, config.engine))
    if config.cluster.rollout.ray_workers:
        refusals.of(partial(ray_module, "rollout.workers.ray_pool"))
        if device is not None:
            refusals.of(partial(check_ray_devices, config, device))
    if device is not None:
        refusals.of(partial(config.cluster.rollout.backend.check_machine, config))
    refusals.tell()


def check_model(
    config: GrpoConfig,
    directory: Path,
    model: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    whole: bool = True,
) -> None:
    """Raise ValueError for a model that cannot hold an episode, or a tokenizer of another model.

    `whole`: the directory has weights, which the sampler may refuse.

    Raises:
        SettingsError: with the files or flags to change, all of them.
    """
    refusals = Refusals()
    longest, vocab_size = longest_sequence(model), model.get_text_config().vocab_size
    if longest is not None and config.max_episode_tokens > longest:
        refusals.lines.append(
            f"--max-episode-tokens {config.max_episode_tokens} is over the {longest} positions of {directory} "
            "(max_position_embeddings): lower it"
        )
    asked = max(config.max_episode_tokens, config.cluster.rollout.max_model_tokens or 0)
    one_table = longest_of_one_table(model.get_text_config().to_dict())
    if one_table is not None and asked > one_table:
        refusals.lines.append(
            f"--max-episode-tokens or --rollout.max-model-tokens, {asked}, is over the {one_table} tokens of a table: "
            f"{REASON}; lower it"
        )
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        refusals.lines.append(
            f"the tokenizer in {directory} has a token {largest}, its model a vocabulary of {vocab_size}: "
            "they don't belong together"
        )
    if whole:
        refusals.of(partial(config.cluster.rollout.backend.check_model, config, directory, model))
    outside = [token for token in config.sampling.stop_token_ids if not 0 <= token < vocab_size]
    if outside:
        name = flag("sampling.stop_token_ids")
        refusals.lines.append(f"{name} {outside[0]} is no token: {directory} has a vocabulary of {vocab_size}")
    refusals.tell()


@dataclass(frozen=True)
class Prepared:
    """A model with its proofs, and the tasks for it; None what was refused."""

    checked: CheckedModel
    tasks: Tasks | None


def check_made(config: GrpoConfig, recipe: Recipe, refusals: Refusals) -> None:
    """Add what refuses a run for the model that its recipe would make to what refuses it already."""
    if make := recipe.make_model:
        with made_for_checks(lambda directory: make(directory, config.seed), refusals.lines) as directory:
            prepare(config, recipe, directory, refusals)


def prepare(config: GrpoConfig, recipe: Recipe, directory: Path, refusals: Refusals, whole: bool = True) -> Prepared:
    """Open the model, and make and check the tasks; what refuses the run is added to `refusals`.

    `whole`: see `open_checked`.
    """
    checked = open_checked(spec_of(config, recipe), directory, config.nproc_per_node, refusals, whole)
    described = checked.model_config
    if described is not None:
        refusals.lines += model_refusals(config.engine, described, checked.ranks, checked.opened)
    return Prepared(checked, prepare_tasks(config, recipe, directory, described, refusals, whole)[1])


def prepare_tasks(
    config: GrpoConfig,
    recipe: Recipe,
    directory: Path,
    model: PretrainedConfig | None,
    refusals: Refusals,
    whole: bool = True,
) -> tuple[PreTrainedTokenizerBase | None, Tasks | None]:
    """Read the tokenizer, and make and check the tasks; what refuses a run is added to `refusals`, and is None.

    Environments of the user's, which may be slow, are opened only where nothing is refused, and the model is `whole`.
    """
    tokenizer = None if model is None else refusals.of(partial(load_tokenizer, directory))
    if model is None or tokenizer is None:
        refusals.lines += data_problems(config)
        return None, None
    refusals.of(partial(check_model, config, directory, model, tokenizer, whole))
    refusals.of(partial(check_teachers, config, tokenizer))
    make = recipe.make_tasks
    tasks = None if make is None else refusals.of(lambda: make(config, tokenizer))
    if tasks is None:
        refusals.lines += data_problems(config)
    if tasks is not None and not (config.plugins.environment and (refusals.lines or not whole)):
        refusals.of(partial(check_prompts, config, tasks, tokenizer, directory))
        if config.teachers.teacher_prompt_template is not None:
            refusals.of(lambda: check_privileged(config, tasks, chat_of(config, tokenizer, directory)))
    return tokenizer, tasks


def check_prompts(
    config: GrpoConfig, tasks: Tasks, tokenizer: PreTrainedTokenizerBase, model: Path | None = None
) -> None:
    """Raise ValueError for prompts (held-out and first ones) without room for a response; `model`: its directory, for
    images.

    Raises:
        ValueError: a prompt is too long, or there is nothing to ask.
    """
    chat = chat_of(config, tokenizer, model)
    declared_metric(tasks)
    template = str(tokenizer.chat_template)
    for name in template_options(config.plugins.template_options):
        if not re.search(rf"\b{name}\b", template):
            raise ValueError(
                f"--template-options {name} has no effect: the tokenizer's chat template does not ask for it"
            )
    for row in _asked(config, tasks):
        if hasattr(tasks.environment(row), "run_group"):
            continue  # an agent (rollout.AgentTask) says itself what it begins with
        opening = asyncio.run(_opening(tasks, row, config.seed))
        if opening.tools and tool_format_of(config, tokenizer) is None:
            raise ValueError(
                f"the tasks have tools ({opening.tools[0].name}), and the chat template shows no format of calls: "
                f"name it with --tool-format, one of {', '.join(formats())}"
            )
        length = len(chat.opening(opening.messages, opening.tools).ids)
        if length >= config.max_episode_tokens:
            raise ValueError(
                f"a prompt has {length} tokens, which leaves none of --max-episode-tokens "
                f"{config.max_episode_tokens} for the answer: raise it. Its last message: {opening.messages[-1]!r:.80}"
            )


def _asked(config: GrpoConfig, tasks: Tasks) -> list[TaskRow]:
    """Return the first tasks of a run; of a user's environments, which may be slow to open, one of each side."""
    held_out, train = tasks.held_out(), tasks.tasks(0, config.prompts_per_step)
    if not config.plugins.environment:
        return [*held_out, *train]
    first = {row.environment: row for row in reversed(train)}
    return [*held_out[:1], *first.values()]


async def _named(what: str, row: TaskRow, answer: Awaitable[T]) -> T:
    """Return the result of a user's environment; raise ValueError that names the error and the place."""
    try:
        return await answer
    except Exception as error:
        raise ValueError(f"{what} of the environment of {row.key!r} raised {type(error).__name__}: {error}") from error


async def _opening(tasks: Tasks, row: TaskRow, seed: int) -> Observation:
    """Return the opening of a task; raise ValueError for an error of a user's environment."""
    # As it is played: one that hangs ends at its timeout.
    environment = await _named("the factory", row, host(tasks.environment(row)))
    context = EpisodeContext(row.id, seed=row.seed(seed), data=row.data, environment=row.environment)
    try:
        opening = await _named("open()", row, environment.open(context))
    except BaseException:
        with suppress(ValueError):  # why it did not open is what counts
            await _named("close()", row, environment.close())
        raise
    await _named("close()", row, environment.close())
    if not isinstance(opening, Observation):
        raise ValueError(f"open() of the environment of {row.key!r} gave {type(opening).__name__}: give an Observation")
    return opening

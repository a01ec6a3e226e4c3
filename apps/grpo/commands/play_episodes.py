"""A few episodes before training, played with the settings that a run would have, all of each shown."""

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from apps.common.cli.refusals import Refusals
from apps.common.data.model_files import config_of_model, open_model_directory
from apps.common.data.tokenizer import quiet_libraries
from apps.common.run.ranks import init_rank
from apps.grpo.config import GrpoConfig
from apps.grpo.preflight import check_machine, prepare_tasks
from apps.grpo.recipe import Recipe
from apps.grpo.registry import registered, runnable
from apps.grpo.sampling.chat import chat_of
from apps.grpo.sampling.source import rollout_settings
from engines.weights.hub import model_directory
from rollout import Episode, RolloutEngine, TaskRow
from schedules.reporting.episode_metrics import TRUNCATED
from schedules.reporting.episode_samples import expected_answer
from schedules.runtime.interrupts import Runner
from schedules.sampling.session import RolloutSession

TRAINED, GIVEN, FAILED = "bold green", "dim", "bold red"


def try_episodes(
    config: GrpoConfig,
    count: int,
    greedy: bool = False,
    console: Console | None = None,
    recipe: Recipe | None = None,
    engine: RolloutEngine | None = None,
) -> list[Episode]:
    """Run the first `count` training tasks, one episode each, and print them; return the episodes.

    `engine` samples instead of the model's own module.

    Raises:
        ValueError: the settings, the model or the tasks can't be used, as in a run.
    """
    quiet_libraries()
    refusals, recipe = Refusals(), recipe or registered(config.recipe)
    if engine is None and not config.cluster.sampler.in_process:
        refusals.lines.append(
            f"--rollout.engine {config.cluster.rollout.engine} is for runs: episodes are tried with the "
            "model's own module; leave it out"
        )
    refusals.of(partial(runnable, config, recipe))
    refusals.of(partial(check_machine, config))
    init_rank(config.threads, config.seed)
    console = console or Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="try_") as folder:
        tokenizer, tasks = None, None
        if model := refusals.of(partial(model_of, config, recipe, Path(folder) / "model")):
            opened = refusals.of(partial(open_model_directory, model, config.engine))
            described = config_of_model(model, opened)
            tokenizer, tasks = prepare_tasks(config, recipe, model, described, refusals)
        refusals.tell()
        assert model and tokenizer and tasks  # noqa: PT018
        sampler = engine or config.cluster.rollout.backend.build(config, model, 0)
        with Runner() as runner:
            session = RolloutSession(
                rollout_settings(config), tasks, chat_of(config, tokenizer, model), sampler, runner
            )
            rows = tasks.tasks(0, count)
            episodes = session.play(rows, greedy)
        for row, episode in zip(rows, episodes, strict=True):
            show(console, row, episode, lambda ids: str(tokenizer.decode(ids)))
    failed = sum(episode.error is not None for episode in episodes)
    rewards = [episode.reward for episode in episodes if episode.score is not None]
    mean = f"mean reward {sum(rewards) / len(rewards):.3g}" if rewards else "no reward"
    console.print(f"{len(episodes)} episodes, {failed} failed, {mean}", style="bold")
    for warning in warnings_of(episodes):
        console.print(Text(warning, FAILED), soft_wrap=True)
    return episodes


def warnings_of(episodes: Sequence[Episode]) -> Iterator[str]:
    """Yield what of the episodes would leave a run without anything to learn."""
    scored = [episode for episode in episodes if episode.score is not None]
    if scored and all(episode.end in TRUNCATED for episode in scored):
        yield "every response was cut off by a limit (the ends above name it)"
    if len(scored) > 1 and len({episode.reward for episode in scored}) == 1:
        yield "every reward is the same: a run learns from rewards that differ within a group"


def show(console: Console, row: TaskRow, episode: Episode, decode: Callable[[Sequence[int]], str]) -> None:
    """Print one episode: its tokens, coloured by what is trained, its calls, how it ended and its reward."""
    console.rule(Text(f"task {row.key}"))
    for number, segment in enumerate(episode.segments):
        name = segment.agent or ("tokens" if number == 0 else f"tokens, stream {number + 1}")
        console.print(f"{name}: {len(segment.ids)}, {segment.sampled} of them trained", style="bold", markup=False)
        text = Text()
        for on, run in itertools.groupby(zip(segment.ids, segment.loss_mask, strict=True), key=lambda pair: pair[1]):
            text.append(visible(decode([token for token, _ in run])), TRAINED if on else GIVEN)
        console.print(text, soft_wrap=True)
    for message in episode.messages:
        for call in message.get("tool_calls") or []:
            function = call["function"]
            console.print(Text(visible(f"call: {function['name']} {function['arguments']}")), soft_wrap=True)
        if message.get("role") == "tool":
            console.print(Text(visible(f"result: {message.get('content')}")), soft_wrap=True)
    expected = expected_answer(row)
    if expected is not None:
        console.print(Text(f"expected: {expected}"), soft_wrap=True)
    if episode.score is None:
        console.print(Text(visible(f"failed: {episode.error}"), FAILED), soft_wrap=True)
        return
    parts = "".join(f", {name} {value:g}" for name, value in episode.score.reward_components.items())
    console.print(Text(f"ended: {episode.end}    reward: {episode.reward:g}{parts}"), soft_wrap=True)


def visible(text: str) -> str:
    """Return the text with control characters replaced by their pictures, so that a terminal does not obey them."""
    return "".join(c if c in "\n\t" or c.isprintable() else _picture(ord(c)) for c in text)


def _picture(code: int) -> str:
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


def model_of(config: GrpoConfig, recipe: Recipe, directory: Path) -> Path | None:
    """Return the model's directory; a recipe without a model, which `runnable` refuses, has none."""
    if config.model is not None:
        return model_directory(config.model)
    return None if recipe.make_model is None else recipe.make_model(directory, config.seed)

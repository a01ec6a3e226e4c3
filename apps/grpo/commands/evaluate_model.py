"""An evaluation without a run: the held-out tasks of a configuration, asked of its model by its sampler."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from apps.common.cli.refusals import Refusals
from apps.common.data.evaluation import evaluation_metrics, marked_answer
from apps.common.data.model_files import config_of_model, open_model_directory
from apps.common.data.tokenizer import quiet_libraries
from apps.common.run.config_file import as_plain
from apps.common.run.ranks import init_rank
from apps.grpo.commands.play_episodes import model_of
from apps.grpo.config import GrpoConfig
from apps.grpo.preflight import check_machine, prepare_tasks
from apps.grpo.recipe import Recipe
from apps.grpo.registry import registered, runnable
from apps.grpo.sampling.chat import chat_of
from apps.grpo.sampling.source import rollout_settings
from apps.grpo.tasks.prompt_tasks import PromptTasks
from schedules.reporting.episode_samples import expected_answer
from schedules.rows.shared import fetch_all
from schedules.runtime.interrupts import Runner
from schedules.sampling.session import Evaluation, RolloutSession


@dataclass(frozen=True)
class Evaluated:
    """An evaluation and its numbers."""

    evaluation: Evaluation
    metrics: dict[str, float]
    model: Path

    def lines(self) -> Iterator[str]:
        """Yield the numbers for people, a line each."""
        asked, failed = len(self.evaluation.episodes), sum(e.score is None for e in self.evaluation.episodes)
        yield f"{self.model}: {len(self.evaluation.rows)} prompts, {asked} answers, {failed} failed"
        for name, value in self.metrics.items():
            if name.endswith(("/low", "/high")):
                continue
            low, high = self.metrics.get(f"{name}/low"), self.metrics.get(f"{name}/high")
            between = "" if low is None else f"  95 % [{low:.4f}, {high:.4f}]"
            yield f"{name.removeprefix('eval/'):24} {value:.4f}{between}"


def evaluate_model(
    config: GrpoConfig, out: Path | None = None, every: bool = False, recipe: Recipe | None = None
) -> Evaluated:
    """Ask the configuration's model the held-out tasks; write numbers and answers to the directory `out`.

    Of --data without --eval-data all rows are asked. `every`: however many there are, not --eval-prompts of them.

    Raises:
        ValueError: the settings, the model or the tasks can't be used, or no answer could be scored.
    """
    quiet_libraries()
    refusals, recipe = Refusals(), recipe or registered(config.recipe, config.recipe_options)
    if every and config.data.data is not None:
        config = replace(config, data=replace(config.data, eval_prompts=1 << 40))
    if config.cluster.rollout.ray_workers or config.nproc_per_node > 1:
        refusals.lines.append("an evaluation has one process beside its sampler's: leave out --nproc-per-node and Ray")
    refusals.of(partial(runnable, config, recipe))
    refusals.of(partial(check_machine, config))
    init_rank(config.threads, config.seed)
    with tempfile.TemporaryDirectory(prefix="evaluate_") as folder, ExitStack() as stack:
        tokenizer, tasks = None, None
        if model := refusals.of(partial(model_of, config, recipe, Path(folder) / "model")):
            opened = refusals.of(partial(open_model_directory, model, config.engine))
            described = config_of_model(model, opened)
            tokenizer, tasks = prepare_tasks(config, recipe, model, described, refusals)
        refusals.tell()
        assert model and tokenizer and tasks  # noqa: PT018
        if isinstance(tasks, PromptTasks) and config.data.eval_data is None:
            tasks = tasks.all_held_out(config.data.eval_prompts)
        sampler: Any = config.cluster.rollout.backend.build(config, model, 0)
        if isinstance(sampler, AbstractContextManager):
            stack.enter_context(sampler)
        session = RolloutSession(
            rollout_settings(config),
            tasks,
            chat_of(config, tokenizer, model),
            sampler,
            stack.enter_context(Runner()),
        )
        evaluation = session.evaluate()
    metrics = evaluation.metrics | evaluation_metrics(
        fetch_all(evaluation.episodes), config.num_generations_eval, getattr(tasks, "reward", None)
    )
    evaluated = Evaluated(evaluation, metrics, Path(config.recipe) if config.model is None else model)
    if out is not None:
        _write(out, evaluated, config)
    return evaluated


def _write(out: Path, evaluated: Evaluated, config: GrpoConfig) -> None:
    out.mkdir(parents=True, exist_ok=True)
    facts = {"model": str(evaluated.model), "prompts": len(evaluated.evaluation.rows), "metrics": evaluated.metrics}
    facts["config"] = as_plain(config)
    (out / "evaluation.json").write_text(json.dumps(facts, indent=1) + "\n")
    with (out / "answers.jsonl").open("w", encoding="utf-8") as file:
        for episode in fetch_all(evaluated.evaluation.episodes):
            row = {
                "task": episode.task_id,
                "expected": expected_answer(evaluated.evaluation.rows[episode.group]),
                "answer": marked_answer(episode),
                "reward": None if episode.score is None else episode.reward,
                "end": episode.end,
                "error": episode.error,
                "messages": [dict(message) for message in episode.messages],
            }
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")

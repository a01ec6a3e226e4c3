"""A GRPO run from start to end: warm start, steps, evaluations, checkpoints, export, report."""

import functools
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from apps.common.data.tokenizer import load_tokenizer, quiet_libraries
from apps.common.run.checkpoint_saver import CheckpointSaver
from apps.common.run.checkpoints import checkpoint_path
from apps.common.run.config_file import as_plain
from apps.common.run.device_memory import memory_metrics
from apps.common.run.divergence import name_sampler_errors
from apps.common.run.export import save_export
from apps.common.run.nonfinite_batch import save_batch_on_nonfinite
from apps.common.run.ranks import init_rank
from apps.common.run.reporter import Reporter
from apps.common.run.run_dir import steps_done
from apps.grpo.build import Demonstrations, RunBuilder, samples_remotely
from apps.grpo.config import GrpoConfig
from apps.grpo.sampling.native import NativeBackend
from apps.grpo.sampling.ray_devices import ray_settings
from apps.grpo.step import correction_line
from apps.grpo.tasks.prompt_tasks import Tasks
from engines import TrainEngine
from engines.loading import LoadedModel
from rollout import RolloutEngine
from runlog import read_metrics
from schedules.protocols import environment_of
from schedules.ray.cluster import in_cluster
from schedules.reporting.episode_samples import Decode, EpisodeSamples, failure_note, token_decoder
from schedules.runtime.collectives import broadcast_result, rank_and_world
from schedules.runtime.interrupts import Runner
from schedules.sampling.session import Evaluation
from schedules.schedule import Schedule, TrainStepResult


@dataclass(frozen=True)
class Result:
    """What a run came to; `accuracy_before` is that of the first start, however often the run was resumed."""

    accuracy_before: float
    accuracy_after: float
    seconds: float
    run_dir: Path
    steps: int


def train(
    config: GrpoConfig,
    tasks: Tasks,
    rollout_engine: RolloutEngine | None = None,
    *,
    model: Path,
    run_dir: Path,
    demonstrations: Demonstrations | None = None,
    opened: LoadedModel | None = None,
) -> Result:
    """Run one rank's part from start to end; every rank calls it.

    `tasks`: what is asked, by step and held out. `rollout_engine`: samples the answers; by default the native one over
    the model's own module. `model`: the Hugging Face directory to start from. `demonstrations`: of the warm start, if
    any. `opened`: the model, where this process has opened its directory already. With `config.resume` the run goes on
    from its last checkpoint, else its finished warm start, else the start.

    Raises:
        ValueError: what was asked cannot be done; before anything is sampled.
    """
    begun = time.perf_counter()
    if rollout_engine is not None and samples_remotely(config):
        raise ValueError("fully_async and Ray start samplers of their own: hand no engine to train()")
    init_rank(config.threads, config.seed)
    quiet_libraries()
    done, checkpoint = broadcast_result(steps_done(run_dir, config.steps) if config.resume else (0, None))
    tokenizer = load_tokenizer(model)
    with Runner() as runner, ExitStack() as stack:
        start = RunBuilder(config, tasks, tokenizer, model, run_dir, done, checkpoint, rollout_engine, runner, opened)
        start = start.warmed(demonstrations)
        stack.enter_context(in_cluster(ray_settings(config, rank_and_world()[1])))
        parts = start.components(stack)
        engine, resumed = parts.trainer.engine, done if config.resume else None
        with (
            Reporter(run_dir, as_plain(config), config.steps, "grpo", resumed, config.tracker) as log,
            parts.schedule(log) as schedule,
            CheckpointSaver(engine, run_dir, config.keep_checkpoints, schedule.saving, schedule.saved) as saves,
            save_batch_on_nonfinite(run_dir),
        ):
            for line in (NativeBackend().weights_line(config, parts.sampler, engine), correction_line(config)):
                if line is not None:
                    log.note(line)
            before, after = _steps(config, tasks, schedule, engine, log, saves, done, token_decoder(tokenizer))
        save_export(engine, tokenizer, run_dir / "export")
    result = Result(before, after, time.perf_counter() - begun, run_dir, config.steps)
    log.close(_summary(result), f"GRPO, {config.recipe}")
    return result


def _steps(
    config: GrpoConfig,
    tasks: Tasks,
    schedule: Schedule,
    engine: TrainEngine,
    log: Reporter,
    saves: CheckpointSaver,
    done: int,
    decode: Decode,
) -> tuple[float, float]:
    """Do steps done..steps; held-out accuracy at the run's first start and at its end."""
    for reason, count in tasks.skipped.items():
        log.note(f"skipped {count} prompts {reason}")
    facts = engine.state_summary() | {"threads": torch.get_num_threads()}
    log.note("{parameters:,} parameters, {dtype} on {device}, {world_size} x {threads} threads".format_map(facts))
    log.note(f"layers compiled: {facts['compiled']}")
    log.note(f"optimizer: {facts['optimizer']}")
    before = _accuracy_before(log.run_dir) if done else None
    after = None
    evaluation: Evaluation | None = None
    if before is None:
        evaluation = schedule.evaluate()
        before = after = evaluation.accuracy
    if not done:
        sizes = {f"run/{name}": facts[name] for name in ("parameters", "world_size", "threads")}
        found = {"eval/accuracy": before} if evaluation is None else evaluation.metrics
        log.step(0, {**found, **sizes}, {"held-out": before})
        _log_episodes(config, tasks, log, 0, None, evaluation, decode)
    for step in range(done + 1, config.steps + 1):
        with name_sampler_errors(step):
            result = schedule.step(step - 1)
        saves.look()
        last = step == config.steps
        row: dict[str, Any] = {**result.metrics, **memory_metrics(config.engine.device)}
        evaluation = None
        if last or step % config.eval_every == 0:
            with name_sampler_errors(step):
                evaluation = schedule.evaluate()
            after = evaluation.accuracy
            row |= evaluation.metrics
        log.step(step, row, _shown(row))
        _log_episodes(config, tasks, log, step, result, evaluation, decode)
        if last or step % config.save_every == 0:
            saves.begin(step, [checkpoint_path(log.run_dir, step)])
    return before, after if after is not None else schedule.evaluate().accuracy


def _log_episodes(
    config: GrpoConfig,
    tasks: Tasks,
    log: Reporter,
    step: int,
    result: TrainStepResult | None,
    evaluation: Evaluation | None,
    decode: Decode,
) -> None:
    """Keep some of the step's groups and of what an evaluation found unsolved, and say why episodes failed."""
    if rank_and_world()[0] != 0:
        return
    for place, played in ((f"step {step}", result), (f"step {step}, held out", evaluation)):
        if played is not None and (failed := failure_note(place, played.episodes)) is not None:
            log.note(failed)
    show = EpisodeSamples(step, config.seed, decode, functools.partial(environment_of, tasks))
    kept: list[dict[str, Any]] = []
    if result is not None:
        rows = tasks.tasks(step - 1, config.prompts_per_step) if result.rows is None else result.rows
        kept += show.groups(result.episodes, result.advantages, rows, config.log_groups)
    if evaluation is not None:
        kept += show.failures(evaluation.episodes, evaluation.rows, config.log_failures)
    for episode in kept:
        log.episode(episode)


def _accuracy_before(run_dir: Path) -> float | None:
    """Return what the run's first evaluation found, from its metrics; None where they are lost."""
    first = next(iter(read_metrics(run_dir)), {})
    return broadcast_result(first.get("eval/accuracy") if first.get("step") == 0 else None)


def _shown(row: dict[str, Any]) -> dict[str, float | int | str]:
    names = {"reward": "reward", "eval/accuracy": "held-out", "tokens_per_second": "tokens/s"}
    return {short: row[name] for name, short in names.items() if name in row}


def _summary(result: Result) -> list[tuple[str, Any]]:
    rise = 100 * (result.accuracy_after - result.accuracy_before)
    return [
        ("held-out accuracy before", f"{result.accuracy_before:.1%}"),
        ("held-out accuracy after", f"{result.accuracy_after:.1%}  ({rise:+.1f} points)"),
        ("steps", result.steps),
        ("time", f"{result.seconds:.0f} s"),
        ("open this", str(result.run_dir / "report.html")),
    ]

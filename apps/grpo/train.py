"""A GRPO run from start to end: warm start, steps, evaluations, checkpoints, export, report."""

import functools
import gc
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from apps.common.data.evaluation import evaluation_metrics
from apps.common.data.tokenizer import load_tokenizer, quiet_libraries
from apps.common.local_rows import whole_batch_line
from apps.common.own_metrics import own_metrics
from apps.common.ray_devices import ray_settings
from apps.common.run.checkpoint_saver import CheckpointSaver
from apps.common.run.checkpoints import checkpoint_path
from apps.common.run.config_file import as_plain
from apps.common.run.device_memory import memory_metrics, memory_note
from apps.common.run.divergence import name_sampler_errors
from apps.common.run.export import save_export
from apps.common.run.idle_reason import idle_reason, reward_called
from apps.common.run.idle_steps import IdleSteps
from apps.common.run.nonfinite_batch import save_batch_on_nonfinite
from apps.common.run.ranks import init_rank
from apps.common.run.reporter import Reporter
from apps.common.run.result import Result as Result
from apps.common.run.result import summary
from apps.common.run.run_dir import steps_done
from apps.common.sampler_certificate import SamplerRecord, unchecked
from apps.common.tasks import Tasks
from apps.grpo.build import Demonstrations, RunBuilder, samples_remotely
from apps.grpo.config import GrpoConfig
from apps.grpo.sampling.native import NativeBackend
from apps.grpo.step import correction_line, whole_batch_reason
from apps.grpo.warm_start import warm_start_metrics
from apps.sft.best_checkpoint import HELD_OUT, RUN_STEP, BestCheckpoint, best_checkpoint_path, find_best_checkpoint
from engines import TrainEngine
from engines.loading import LoadedModel
from rollout import RolloutEngine, TaskRow
from runlog import read_metrics
from schedules.protocols import environment_of
from schedules.ray.cluster import in_cluster
from schedules.reporting.episode_samples import Decode, EpisodeSamples, failure_note, token_decoder
from schedules.rows.shared import on_first_rank
from schedules.runtime.collectives import broadcast_result, rank_and_world
from schedules.runtime.interrupts import Runner, note_termination
from schedules.sampling.session import Evaluation, HeldOutMetric
from schedules.schedule import Schedule, TrainStepResult
from seqpack.memory import ledger


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
    with note_termination() as terminated, Runner() as runner, ExitStack() as stack:
        start = RunBuilder(config, tasks, tokenizer, model, run_dir, done, checkpoint, rollout_engine, runner, opened)
        start = start.warmed(demonstrations)
        gc.collect()  # an engine has reference cycles: that of the warm start is freed here
        ledger.clear()
        stack.enter_context(in_cluster(ray_settings(config, rank_and_world()[1])))
        parts = start.components(stack)
        engine, resumed = parts.trainer.engine, done if config.resume else None
        with (
            Reporter(run_dir, as_plain(config), config.steps, "grpo", resumed, config.tracker) as log,
            parts.schedule(log) as schedule,
            CheckpointSaver(engine, run_dir, config.keep_checkpoints, schedule.saving, schedule.saved) as saves,
            save_batch_on_nonfinite(run_dir),
        ):
            lines = (NativeBackend().weights_line(config, parts.sampler, engine), correction_line(config))
            for line in (*lines, whole_batch_line(whole_batch_reason(config))):
                if line is not None:
                    log.note(line)
            record = SamplerRecord(log, engine, config.cluster.rollout.engine, start.model)
            steps = _Steps(config, tasks, schedule, engine, log, saves, token_decoder(tokenizer), record, terminated)
            held_out = steps.run(done)
        if held_out.best is not None:
            engine.load(str(best_checkpoint_path(run_dir)))
        save_export(engine, tokenizer, run_dir / "export")
    result = Result(
        held_out.before, held_out.after, time.perf_counter() - begun, run_dir, config.steps, held_out.metric
    )
    log.close(summary(result), f"GRPO, {config.recipe}")
    return result


@dataclass(frozen=True)
class _HeldOut:
    """What the mean reward of held-out responses is called in this run, and its value at the run's first start and
    last."""

    metric: HeldOutMetric
    before: float
    after: float
    best: BestCheckpoint | None = None
    """The step of the best evaluation, whose weights are kept; its loss is the negative mean reward."""


@dataclass
class _Steps:
    """The parts of a run's loop."""

    config: GrpoConfig
    tasks: Tasks
    schedule: Schedule
    engine: TrainEngine
    log: Reporter
    saves: CheckpointSaver
    decode: Decode
    record: SamplerRecord
    terminated: Callable[[], bool]
    """Whether SIGTERM came."""

    def run(self, done: int) -> _HeldOut:
        """Do steps done..steps; return the held-out results of the run's first start and its end.

        Raises:
            IdleRunError: so many steps in a row trained nothing as the configuration allows.
            SystemExit: SIGTERM came; the run has a checkpoint.
        """
        config, log, schedule = self.config, self.log, self.schedule
        idle = IdleSteps.resumed(config.allow_idle_steps, log.run_dir, done)
        held_out = self._begin(done)
        if config.export == "best":
            held_out = replace(held_out, best=find_best_checkpoint(log.run_dir, done, {}))
        for step in range(done + 1, config.steps + 1):
            with name_sampler_errors(step), self.record.of_mismatch():
                result = schedule.step(step - 1)
            if result.sampler is not None:
                self.record.keep(result.sampler)
            if step == done + 1 and (line := unchecked(config.cluster.schedule.mode, result)):
                log.note(line)
            self.saves.look()
            last = step == config.steps
            row: dict[str, Any] = {**result.metrics, **memory_metrics(config.engine.device)}
            row |= reward_called(result.episodes, self._rows(step, result), self.tasks)
            row |= self._own_metrics(step, result, row)
            reason = idle_reason(result.episodes, row, config.corrected_objective, config.advantage)
            row |= idle.row(reason)
            ends = self._terminated(step) and not last
            stops = idle.too_many and not last
            evaluation = None
            if last or step % config.eval_every == 0:
                with name_sampler_errors(step):
                    evaluation = schedule.evaluate()
                held_out = self._better(replace(held_out, after=evaluation.accuracy), step)
                row |= self._evaluated(evaluation, held_out.metric)
            log.step(step, row, _shown(row))
            if step == done + 1:
                log.note(memory_note(row))
            self._log_episodes(step, result, evaluation)
            better = held_out.best is not None and held_out.best.step == step
            if better or last or stops or ends or step % config.save_every == 0:
                kept = [best_checkpoint_path(log.run_dir)] * better + [checkpoint_path(log.run_dir, step)]
                self.saves.begin(step, kept, {RUN_STEP: step, HELD_OUT: -held_out.after} if better else None)
            if stops:
                raise idle.error(step, reason, log.run_dir)
            if ends:
                log.note(f"SIGTERM: stopped after step {step}; --resume --run-dir {log.run_dir} goes on")
                raise SystemExit(128 + signal.SIGTERM)
        return held_out

    def _terminated(self, step: int) -> bool:
        """Return whether SIGTERM has come to rank 0, at a step that can have a checkpoint; collective."""
        schedule = self.config.cluster.schedule
        window = schedule.parameter_sync_step if schedule.mode == "fully_async" else 1
        return broadcast_result(self.terminated()) and step % window == 0

    def _begin(self, done: int) -> _HeldOut:
        """Tell what the run is; return what its first evaluation found, and log it as a new run's first row."""
        config, log = self.config, self.log
        for reason, count in self.tasks.skipped.items():
            log.note(f"skipped {count} prompts {reason}")
        facts = self.engine.state_summary() | {"threads": torch.get_num_threads()}
        log.note("{parameters:,} parameters, {dtype} on {device}, {world_size} x {threads} threads".format_map(facts))
        log.note(f"layers compiled: {facts['compiled']}")
        log.note(f"optimizer: {facts['optimizer']}")
        held_out = _found_before(log.run_dir) if done else None
        if held_out is not None and done < config.steps:
            return held_out
        evaluation = self.schedule.evaluate()
        if held_out is None:
            held_out = _HeldOut(evaluation.metric, evaluation.accuracy, evaluation.accuracy)
        held_out = replace(held_out, after=evaluation.accuracy)
        if not done:
            sizes = {f"run/{name}": facts[name] for name in ("parameters", "world_size", "threads")}
            row = {**self._evaluated(evaluation, held_out.metric), **sizes, **warm_start_metrics(config, log.run_dir)}
            log.step(0, row, _shown(row))
            self._log_episodes(0, None, evaluation)
        return held_out

    def _better(self, held_out: _HeldOut, step: int) -> _HeldOut:
        """Return what was found, with this step as the best where it is better than all before and a run keeps it."""
        if self.config.export != "best" or (held_out.best is not None and -held_out.after >= held_out.best.loss):
            return held_out
        self.log.note(f"step {step} is the best so far: held-out {held_out.metric} {held_out.after:.4g}")
        return replace(held_out, best=BestCheckpoint(step, -held_out.after))

    def _evaluated(self, evaluation: Evaluation, metric: HeldOutMetric) -> dict[str, float]:
        """Return the metrics of an evaluation, with those of several answers to a prompt."""
        count = self.config.num_generations_eval
        several = [*on_first_rank(evaluation.episodes).values()] if count > 1 else []
        reward = getattr(self.tasks, "reward", None)
        return evaluation.metrics_as(metric) | (evaluation_metrics(several, count, reward) if several else {})

    def _rows(self, step: int, result: TrainStepResult) -> Sequence[TaskRow]:
        """Return the tasks of a step, by group."""
        return self.tasks.tasks(step - 1, self.config.prompts_per_step) if result.rows is None else result.rows

    def _own_metrics(self, step: int, result: TrainStepResult, row: dict[str, Any]) -> dict[str, float]:
        """Return the metrics of the user's, which rank 0 asks for; collective."""
        episodes = [*on_first_rank(result.episodes).values()] if self.config.metric else []
        if rank_and_world()[0] or not self.config.metric:
            return {}
        given = {
            "episodes": episodes,
            "advantages": result.advantages,
            "tasks": self._rows(step, result),
            "metrics": row,
            "step": step,
        }
        return own_metrics(self.config.metric, self.config.metric_options, given)

    def _log_episodes(self, step: int, result: TrainStepResult | None, evaluation: Evaluation | None) -> None:
        """Keep some of the step's groups and of what an evaluation found unsolved, and say why episodes failed.

        Collective: what is shown comes to rank 0, whose log it is.
        """
        config, log = self.config, self.log
        for place, played in ((f"step {step}", result), (f"step {step}, held out", evaluation)):
            if played is not None and (failed := failure_note(place, played.episodes)) is not None:
                log.note(failed)
        show = EpisodeSamples(step, config.seed, self.decode, functools.partial(environment_of, self.tasks))
        kept: list[dict[str, Any]] = []
        if result is not None:
            kept += show.groups(result.episodes, result.advantages, self._rows(step, result), config.log_groups)
        if evaluation is not None:
            kept += show.failures(evaluation.episodes, evaluation.rows, config.log_failures)
        for episode in kept:
            log.episode(episode)


def _found_before(run_dir: Path) -> _HeldOut | None:
    """Return what the run's first evaluation found, from its metrics; None where they are lost."""
    first = next(iter(read_metrics(run_dir)), {})
    named = [(name, first[f"eval/{name}"]) for name in get_args(HeldOutMetric) if f"eval/{name}" in first]
    first_rows = [_HeldOut(name, value, value) for name, value in named if first.get("step") == 0]
    return broadcast_result(first_rows[0] if first_rows else None, (_HeldOut,))


def _shown(row: dict[str, Any]) -> dict[str, float | int | str]:
    names = {
        "reward": "reward",
        "eval/accuracy": "held-out",
        "eval/score": "held-out score",
        "tokens_per_second": "tokens/s",
    }
    return {short: row[name] for name, short in names.items() if name in row}

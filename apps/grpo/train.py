"""A GRPO run from start to end: warm start, steps, evaluations, checkpoints, export, report."""

import functools
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from apps.common.checkpoints import checkpoint_path
from apps.common.config_file import as_plain
from apps.common.device_memory import memory_metrics
from apps.common.divergence import told_by_sampler
from apps.common.export import save_export
from apps.common.interrupts import Runner
from apps.common.kept_batch import keeping_batch
from apps.common.plan.buffers import kept_apart
from apps.common.ranks import from_rank_0, init_rank, rank_and_world
from apps.common.reporter import Reporter
from apps.common.run_dir import steps_done
from apps.common.saves import Saves
from apps.common.tokens import load_tokenizer, quiet_libraries
from apps.grpo.config import GrpoConfig
from apps.grpo.episodes import Decode, Shown, decoder, failure_note
from apps.grpo.native_sampler import engine_config, native_engine, weights_line
from apps.grpo.samplers import SamplerElsewhere, vllm_engine
from apps.grpo.samplers_ray import RaySamplers, RaySession, in_cluster
from apps.grpo.samplers_ray_ranks import FollowingSession, RayElsewhere
from apps.grpo.schedule import InTurn, Schedule
from apps.grpo.schedule_async import FullyAsync
from apps.grpo.schedule_async_ranks import FollowingAsync
from apps.grpo.schedule_one_step import OneStepOff
from apps.grpo.session import Evaluation, Session, chat_of, environment_of
from apps.grpo.step import StepResult
from apps.grpo.tasks import Conversation, Tasks
from apps.grpo.warm_start import warm_model, warm_start
from engines import TrainEngine, build_engine
from rollout import RolloutEngine
from runlog import read_metrics

Demonstrations = Callable[[GrpoConfig, int], list[Conversation]]


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
) -> Result:
    """Run one rank's part from start to end; every rank calls it.

    `tasks`: what is asked, by step and held out. `rollout_engine`: samples the answers; by default the native one over
    the model's own module. `model`: the Hugging Face directory to start from. `demonstrations`: of the warm start, if
    any. With `config.resume` the run goes on from its last checkpoint, else its finished warm start, else the start.

    Raises:
        ValueError: what was asked cannot be done; before anything is sampled.
    """
    begun = time.perf_counter()
    if rollout_engine is not None and _samples_elsewhere(config):
        raise ValueError("fully_async and Ray start samplers of their own: hand no engine to train()")
    init_rank(config.threads, config.seed)
    quiet_libraries()
    done, checkpoint = from_rank_0(steps_done(run_dir, config.steps) if config.resume else (0, None))
    tokenizer = load_tokenizer(model)
    with Runner() as runner, ExitStack() as stack:
        session_of = functools.partial(_session, config, tasks, tokenizer, runner)

        def looks(start: Path, trained: TrainEngine) -> Session:
            return session_of(start, rollout_engine or native_engine(config, start, tokenizer, 0, trained))

        if config.warm_start.steps:
            model = _warmed(config, model, run_dir, tokenizer, demonstrations, looks if not done else None)
        stack.enter_context(in_cluster(config))
        build = functools.partial(_engine, config, model, checkpoint)
        lender = build() if rollout_engine is None and kept_apart(config.engine, config.cluster) is None else None
        sampler = _sampler(config, tasks, model, tokenizer, max(0, done - 1), rollout_engine, runner, stack, lender)
        session = None if sampler is None else session_of(model, sampler)
        engine = build() if lender is None else lender
        if session is not None and (checkpoint is not None or rollout_engine is not None):
            session.sync(engine)

        def schedule() -> Schedule:
            if session is None and rank_and_world()[0]:
                return FollowingAsync(config, tasks, engine, run_dir, done, runner)
            if session is None:
                return FullyAsync(config, tasks, engine, model, run_dir, done, runner, log.live)
            session.live.show = log.live
            kind = InTurn if config.cluster.schedule.mode == "sync" else OneStepOff
            return kind(config, session, engine, run_dir, done)

        resumed = done if config.resume else None
        with (
            Reporter(run_dir, as_plain(config), config.steps, "grpo", resumed, config.tracker) as log,
            schedule() as chosen,
            Saves(engine, run_dir, config.keep_checkpoints, chosen.saving, chosen.saved) as saves,
            keeping_batch(run_dir),
        ):
            if (where := weights_line(config, sampler, engine)) is not None:
                log.note(where)
            before, after = _steps(config, tasks, chosen, engine, log, saves, done, decoder(tokenizer))
        save_export(engine, tokenizer, run_dir / "export")
    result = Result(before, after, time.perf_counter() - begun, run_dir, config.steps)
    log.close(_summary(result), f"GRPO, {config.recipe}")
    return result


def _session(
    config: GrpoConfig,
    tasks: Tasks,
    tokenizer: PreTrainedTokenizerBase,
    runner: Runner,
    directory: Path,
    sampler: RolloutEngine | RaySamplers | SamplerElsewhere,
) -> Session:
    chat = chat_of(config, tokenizer, directory)
    if isinstance(sampler, RaySamplers):
        return RaySession(config, tasks, chat, sampler, runner)
    if isinstance(sampler, RayElsewhere):
        return FollowingSession(config, tasks, chat, sampler, runner)
    return Session(config, tasks, chat, sampler, runner)  # type: ignore[arg-type]  # SamplerElsewhere is asked nothing


def _warmed(
    config: GrpoConfig,
    model: Path,
    run_dir: Path,
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: Demonstrations | None,
    looks: Callable[[Path, TrainEngine], Session] | None,
) -> Path:
    """The directory of the warm start's model; it is made where it is not whole, unless there are steps after it."""
    folder = run_dir / "warm-start"
    warm = warm_model(folder)
    if warm is None and looks is not None:
        if demonstrations is None:
            raise ValueError("a warm start needs demonstrations: hand them to train()")
        warm = warm_start(config, demonstrations, model, tokenizer, folder, functools.partial(looks, model))
    return warm or model


def _engine(config: GrpoConfig, model: Path, checkpoint: Path | None) -> TrainEngine:
    """The engine that trains, at the checkpoint; beside it the frozen model that the run starts from, where the KL
    penalty needs one."""
    engine = build_engine(engine_config(config, model))
    if config.objective.kl_coef and not config.engine.lora.rank:
        engine.reference = build_engine(engine_config(config, model), trainable=False)
    if checkpoint is not None:
        engine.load(str(checkpoint))
    return engine


def _samples_elsewhere(config: GrpoConfig) -> bool:
    """Whether the run starts processes that sample."""
    return config.cluster.schedule.mode == "fully_async" or config.cluster.rollout.ray_workers > 0


def _sampler(
    config: GrpoConfig,
    tasks: Tasks,
    model: Path,
    tokenizer: PreTrainedTokenizerBase,
    version: int,
    given: RolloutEngine | None,
    runner: Runner,
    stack: ExitStack,
    lender: TrainEngine | None,
) -> RolloutEngine | RaySamplers | SamplerElsewhere | None:
    """What this process samples with, closed by the stack; None where the schedule starts a process that samples.

    `lender`: the engine whose weights it may compute with; any other sampler takes its device before the engine does.
    """
    if config.cluster.schedule.mode == "fully_async":
        return None
    if config.cluster.rollout.ray_workers and rank_and_world()[0]:
        return RayElsewhere(version)
    if config.cluster.rollout.ray_workers:
        return stack.enter_context(RaySamplers(config, tasks, model, version))
    if given is not None:
        return given
    if config.cluster.rollout.engine == "vllm":
        rank, world = rank_and_world()
        if rank % config.cluster.rollout.ranks_each(world):
            return SamplerElsewhere(version)
        sampler = stack.enter_context(vllm_engine(config, model, version))
        if config.cluster.rollout.sleep:
            runner.run(sampler.sleep())  # before training takes the device
        return sampler
    return native_engine(config, model, tokenizer, version, lender)


def _steps(
    config: GrpoConfig,
    tasks: Tasks,
    schedule: Schedule,
    engine: TrainEngine,
    log: Reporter,
    saves: Saves,
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
        with told_by_sampler(step):
            result = schedule.step(step - 1)
        saves.look()
        last = step == config.steps
        row: dict[str, Any] = {**result.metrics, **memory_metrics(config.engine.device)}
        evaluation = None
        if last or step % config.eval_every == 0:
            with told_by_sampler(step):
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
    result: StepResult | None,
    evaluation: Evaluation | None,
    decode: Decode,
) -> None:
    """Keep some of the step's groups and of what an evaluation found unsolved, and say why episodes failed."""
    if rank_and_world()[0] != 0:
        return
    for place, played in ((f"step {step}", result), (f"step {step}, held out", evaluation)):
        if played is not None and (failed := failure_note(place, played.episodes)) is not None:
            log.note(failed)
    show = Shown(step, config.seed, decode, functools.partial(environment_of, tasks))
    kept: list[dict[str, Any]] = []
    if result is not None:
        rows = tasks.tasks(step - 1, config.prompts) if result.rows is None else result.rows
        kept += show.groups(result.episodes, result.advantages, rows, config.keep_groups)
    if evaluation is not None:
        kept += show.failures(evaluation.episodes, evaluation.rows, config.keep_failures)
    for episode in kept:
        log.episode(episode)


def _accuracy_before(run_dir: Path) -> float | None:
    """What the run's first evaluation found, from its metrics; None where they are lost."""
    first = next(iter(read_metrics(run_dir)), {})
    return from_rank_0(first.get("eval/accuracy") if first.get("step") == 0 else None)


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

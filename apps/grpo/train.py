"""A GRPO run from start to end: warm start, steps, evaluations, checkpoints, export, report."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from apps.common.checkpoints import checkpoint_path, delete_old_checkpoints
from apps.common.config_file import as_plain
from apps.common.export import save_export
from apps.common.ranks import from_rank_0, init_rank, rank_and_world
from apps.common.reporter import Reporter
from apps.common.run_dir import steps_done
from apps.common.tokens import end_of_turn, load_tokenizer, quiet_libraries
from apps.grpo.config import GrpoConfig
from apps.grpo.episodes import kept_episodes
from apps.grpo.session import Session
from apps.grpo.step import grpo_step
from apps.grpo.tasks import Conversation, Tasks
from apps.grpo.warm_start import warm_model, warm_start
from engines import EngineConfig, TrainEngine, build_engine
from engines.loading import cast_parameters, compute_dtype, load_model, resolve_device
from rollout import Chat, NativeEngine, RolloutEngine
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

    `tasks`: what is asked, by step and held out (`apps.grpo.tasks.Tasks`). `rollout_engine`: samples the answers; by
    default the native one over the model's own module. `model`: the Hugging Face directory to start from.
    `demonstrations`: of the warm start, where the configuration asks for one. With `config.resume` the run goes on from
    its last checkpoint, else from its finished warm start, else from the start.

    Raises:
        ValueError: what was asked cannot be done; before anything is sampled.
    """
    begun = time.perf_counter()
    init_rank(config.threads, config.seed)
    quiet_libraries()
    done, checkpoint = from_rank_0(steps_done(run_dir, config.steps) if config.resume else (0, None))
    tokenizer = load_tokenizer(model)
    with asyncio.Runner() as runner:

        def session_of(directory: Path, version: int = 0) -> Session:
            sampler = rollout_engine or _native_engine(config, directory, tokenizer, version)
            return Session(config, tasks, Chat(tokenizer, end_of_turn(tokenizer)), sampler, runner)

        if config.warm_start.steps:
            folder = run_dir / "warm-start"
            warm = warm_model(folder)
            if warm is None and not done:
                if demonstrations is None:
                    raise ValueError("a warm start needs demonstrations: hand them to train()")
                warm = warm_start(config, demonstrations, model, tokenizer, folder, session_of(model))
            model = warm or model
        session = session_of(model, max(0, done - 1))
        engine = build_engine(_engine_config(config, model))
        if checkpoint is not None:
            engine.load(str(checkpoint))
        if checkpoint is not None or rollout_engine is not None:
            session.sync(engine)
        resume_step = done if config.resume else None
        with Reporter(run_dir, as_plain(config), config.steps, "grpo", resume_step) as log:
            before, after = _steps(config, session, engine, log, done, tokenizer)
        save_export(engine, tokenizer, run_dir / "export")
    result = Result(before, after, time.perf_counter() - begun, run_dir, config.steps)
    log.close(_summary(result), f"GRPO, {config.recipe}")
    return result


def _steps(
    config: GrpoConfig,
    session: Session,
    engine: TrainEngine,
    log: Reporter,
    done: int,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[float, float]:
    """Do steps done..steps; held-out accuracy at the run's first start and at its end."""
    for reason, count in session.tasks.skipped.items():
        log.note(f"skipped {count} prompts {reason}")
    facts = engine.state_summary() | {"threads": torch.get_num_threads()}
    log.note("{parameters:,} parameters, {dtype} on {device}, {world_size} x {threads} threads".format_map(facts))
    before = _accuracy_before(log.run_dir) if done else None
    after = None
    if before is None:
        before = after = session.accuracy()
    if not done:
        sizes = {f"run/{name}": facts[name] for name in ("parameters", "world_size", "threads")}
        log.step(0, {"eval/accuracy": before, **sizes}, {"held-out": before})
    for step in range(done + 1, config.steps + 1):
        result = grpo_step(config, session, engine, step - 1)
        last = step == config.steps
        row: dict[str, Any] = dict(result.metrics)
        if last or step % config.eval_every == 0:
            after = row["eval/accuracy"] = session.accuracy()
        log.step(step, row, _shown(row))
        if rank_and_world()[0] == 0:
            for episode in kept_episodes(result, step, config.keep_episodes, tokenizer):
                log.episode(episode)
        if last or step % config.save_every == 0:
            engine.save(str(checkpoint_path(log.run_dir, step)))
            if rank_and_world()[0] == 0:
                delete_old_checkpoints(log.run_dir, config.keep_checkpoints)
    return before, after if after is not None else session.accuracy()


def _accuracy_before(run_dir: Path) -> float | None:
    """What the run's first evaluation found, from its metrics; None where they are lost."""
    first = next(iter(read_metrics(run_dir)), {})
    return from_rank_0(first.get("eval/accuracy") if first.get("step") == 0 else None)


def _native_engine(config: GrpoConfig, model: Path, tokenizer: PreTrainedTokenizerBase, version: int) -> NativeEngine:
    engine_config = _engine_config(config, model)
    device = resolve_device(engine_config)
    # Not module.to(dtype): that would round the rotary frequencies as well, and the sampler would not be the policy.
    module = cast_parameters(load_model(engine_config), compute_dtype(engine_config, device)).to(device)
    return NativeEngine(module, pad_token_id=tokenizer.pad_token_id or 0, seed=config.seed, version=version)


def _engine_config(config: GrpoConfig, model: Path) -> EngineConfig:
    return replace(config.engine, model=str(model), temperature=config.sampling.temperature)


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

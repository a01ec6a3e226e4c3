"""A GRPO run from start to end: warm start, steps, evaluations, checkpoints, export, report."""

import asyncio
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from apps.common.checkpoints import checkpoint_path, last_checkpoint
from apps.common.config_file import as_plain
from apps.common.export import save_export
from apps.common.ranks import rank_and_world, settle
from apps.common.reporter import Reporter
from apps.common.tokens import end_of_turn, load_tokenizer, quiet_libraries
from apps.grpo.config import GrpoConfig
from apps.grpo.session import Session
from apps.grpo.step import StepResult, grpo_step
from apps.grpo.tasks import make_tasks
from apps.grpo.warm_start import warm_start
from engines import EngineConfig, TrainEngine, build_engine
from engines.loading import compute_dtype, load_model, resolve_device
from rollout import Chat, NativeEngine


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    accuracy_before: float
    accuracy_after: float
    seconds: float
    run_dir: Path
    steps: int


def train(config: GrpoConfig, model: Path, run_dir: Path) -> Result:
    """One rank's whole run; every rank calls it. `model` is the Hugging Face directory to start from."""
    begun = time.perf_counter()
    settle(config.threads, config.seed)
    quiet_libraries()
    tokenizer = load_tokenizer(model)
    resumed = last_checkpoint(run_dir) if config.resume else None
    with asyncio.Runner() as runner:
        if resumed is None and config.warm_start.steps and config.model is None:
            session = _session(config, model, tokenizer, runner)
            model = warm_start(config, model, tokenizer, run_dir / "warm-start", session).model
        elif (run_dir / "warm-start" / "export").is_dir():
            model = run_dir / "warm-start" / "export"
        session = _session(config, model, tokenizer, runner)
        engine = build_engine(_engine_config(config, model))
        done = 0
        if resumed is not None:
            done, checkpoint = resumed
            engine.load(str(checkpoint))
            session.sync(engine, done)
        log = Reporter(run_dir, as_plain(config), config.steps, "grpo", resume_step=done if config.resume else None)
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
    """Steps done..steps; held-out accuracy at the start of this process and at the end."""
    with log:
        before = after = session.accuracy()
        if done == 0:
            log.step(0, {"eval/accuracy": before}, {"held-out": before})
        for step in range(done, config.steps):
            result = grpo_step(config, session, engine, step)
            last = step + 1 == config.steps
            row: dict[str, Any] = dict(result.metrics)
            if last or (step + 1) % config.eval_every == 0:
                after = row["eval/accuracy"] = session.accuracy()
            log.step(step + 1, row, _shown(row))
            for episode in _kept(config, result, step + 1, tokenizer):
                log.episode(episode)
            if last or (step + 1) % config.save_every == 0:
                engine.save(str(checkpoint_path(log.run_dir, step + 1)))
    return before, after


def _session(config: GrpoConfig, model: Path, tokenizer: PreTrainedTokenizerBase, runner: asyncio.Runner) -> Session:
    engine_config = _engine_config(config, model)
    device = resolve_device(engine_config)
    module = load_model(engine_config).to(device=device, dtype=compute_dtype(engine_config, device))
    sampler = NativeEngine(module, pad_token_id=tokenizer.pad_token_id or 0, seed=config.seed)
    tasks = make_tasks(config.data, config.seed, tokenizer)
    return Session(config, tasks, Chat(tokenizer, end_of_turn(tokenizer)), sampler, runner)


def _engine_config(config: GrpoConfig, model: Path) -> EngineConfig:
    return replace(config.engine, model=str(model), temperature=config.sampling.temperature)


def _shown(row: dict[str, Any]) -> dict[str, float | int | str]:
    names = {"reward": "reward", "eval/accuracy": "held-out", "tokens_per_second": "tokens/s"}
    return {short: row[name] for name, short in names.items() if name in row}


def _kept(
    config: GrpoConfig, result: StepResult, step: int, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """A few of the step's episodes for the report, from all over the batch, those with an advantage first."""
    if rank_and_world()[0] != 0:
        return []
    spread = random.Random(step).sample(range(len(result.trajectories)), len(result.trajectories))
    order = sorted(spread, key=lambda i: result.advantages[i] == 0)
    return [
        {
            "step": step,
            "tokens": [tokenizer.decode([token]) for token in result.trajectories[i].ids],
            "mask": list(result.trajectories[i].loss_mask),
            "advantage": result.advantages[i],
            "log_probs": list(result.trajectories[i].log_probs),
            "versions": list(result.trajectories[i].policy_versions),
            "reward": result.trajectories[i].reward,
            "group": result.trajectories[i].group,
            "messages": [dict(message) for message in result.trajectories[i].messages],
            "metadata": dict(result.trajectories[i].metadata),
        }
        for i in order[: config.keep_episodes]
    ]


def _summary(result: Result) -> list[tuple[str, Any]]:
    rise = 100 * (result.accuracy_after - result.accuracy_before)
    return [
        ("held-out accuracy before", f"{result.accuracy_before:.1%}"),
        ("held-out accuracy after", f"{result.accuracy_after:.1%}  ({rise:+.1f} points)"),
        ("steps", result.steps),
        ("time", f"{result.seconds:.0f} s"),
        ("open this", str(result.run_dir / "report.html")),
    ]

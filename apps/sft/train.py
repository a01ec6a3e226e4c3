"""A supervised run from start to end: steps, held-out loss, checkpoints, export, report."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from apps.common.checkpoints import checkpoint_path, delete_old_checkpoints
from apps.common.config_file import as_plain
from apps.common.divergence import check_loss
from apps.common.export import save_export
from apps.common.ranks import from_rank_0, init_rank, rank_and_world
from apps.common.reporter import Reporter
from apps.common.run_dir import steps_done
from apps.common.tokens import load_tokenizer, quiet_libraries
from apps.sft.config import SftConfig
from apps.sft.data import Conversations
from apps.sft.fit import fit
from apps.sft.samples import Sample, batch_of
from engines import TrainEngine, build_engine
from rollout.episode import derive_seed
from runlog import read_metrics


@dataclass(frozen=True)
class Result:
    """What a run came to: the held-out loss in nats a token, before and after."""

    loss_before: float
    loss_after: float
    seconds: float
    run_dir: Path
    steps: int


def train(config: SftConfig, conversations: Conversations, model: Path, run_dir: Path) -> Result:
    """Run one rank's part from start to end; every rank calls it.

    Raises:
        DivergenceError, engines.NonFiniteError: the run diverged; checkpoints stay, there is no export.
    """
    begun = time.perf_counter()
    init_rank(config.threads, config.seed)
    quiet_libraries()
    done, checkpoint = from_rank_0(steps_done(run_dir, config.steps) if config.resume else (0, None))
    tokenizer = load_tokenizer(model)
    engine = build_engine(replace(config.engine, model=str(model)))
    if checkpoint is not None:
        engine.load(str(checkpoint))
    with Reporter(run_dir, as_plain(config), config.steps, "sft", done if config.resume else None) as log:
        before, after = _steps(config, conversations, engine, log, done, len(tokenizer))
    save_export(engine, tokenizer, run_dir / "export")
    result = Result(before, after, time.perf_counter() - begun, run_dir, config.steps)
    log.close(_summary(result), f"SFT, {config.recipe}")
    return result


def held_out_loss(engine: TrainEngine, samples: Sequence[Sample]) -> float:
    """Mean negative log-likelihood of the samples' trained tokens, in nats."""
    batch = batch_of(samples)
    log_probs, mask = engine.forward(batch)["log_probs"].values(), batch["loss_mask"].values()
    return -log_probs[mask].mean().item()


def batches(samples: Sequence[Sample], batch_size: int, seed: int) -> Callable[[int], TensorDict]:
    """The batch of a step, by seed and step alone: every epoch reads all samples once, in an order of its own."""

    def order(epoch: int) -> list[int]:
        return random.Random(derive_seed(seed, "epoch", epoch)).sample(range(len(samples)), len(samples))

    def batch_at(step: int) -> TensorDict:
        first = step * batch_size
        epochs = {n // len(samples) for n in range(first, first + batch_size)}
        orders = {epoch: order(epoch) for epoch in epochs}
        chosen = [orders[n // len(samples)][n % len(samples)] for n in range(first, first + batch_size)]
        return batch_of([samples[i] for i in chosen])

    return batch_at


def _steps(
    config: SftConfig, conversations: Conversations, engine: TrainEngine, log: Reporter, done: int, vocab_size: int
) -> tuple[float, float]:
    """Do steps done..steps; held-out loss at the run's first start and at its end."""
    held_out = conversations.held_out[: config.eval_conversations]
    for line in conversations.skipped.lines():
        log.note(line)
    before = _loss_before(log.run_dir) if done else None
    after = None
    if before is None:
        before = after = held_out_loss(engine, held_out)
    if not done:
        log.step(0, {"eval/loss": before}, {"held-out loss": before})
    batch_at = batches(conversations.train, config.batch_size, config.seed)
    clock = time.perf_counter()
    for step, metrics in fit(engine, batch_at, config.objective, config.steps, start=done):
        row: dict[str, Any] = {f"train/{name}": value for name, value in metrics.items()}
        row["tokens_per_second"] = metrics["tokens"] / (time.perf_counter() - clock)
        shown: dict[str, float | int | str] = {"loss": metrics["loss"], "tokens/s": row["tokens_per_second"]}
        last = step == config.steps
        if last or step % config.eval_every == 0:
            after = row["eval/loss"] = shown["held-out loss"] = held_out_loss(engine, held_out)
        log.step(step, row, shown)
        if after is not None:
            check_loss(step, after, vocab_size)
        if last or step % config.save_every == 0:
            engine.save(str(checkpoint_path(log.run_dir, step)))
            if rank_and_world()[0] == 0:
                delete_old_checkpoints(log.run_dir, config.keep_checkpoints)
        clock = time.perf_counter()
    return before, after if after is not None else held_out_loss(engine, held_out)


def _loss_before(run_dir: Path) -> float | None:
    """What the run's first evaluation found, from its metrics; None where they are lost."""
    first = next(iter(read_metrics(run_dir)), {})
    return from_rank_0(first.get("eval/loss") if first.get("step") == 0 else None)


def _summary(result: Result) -> list[tuple[str, Any]]:
    return [
        ("held-out loss before", result.loss_before),
        ("held-out loss after", result.loss_after),
        ("steps", result.steps),
        ("time", f"{result.seconds:.0f} s"),
        ("open this", str(result.run_dir / "report.html")),
    ]

"""A supervised run from start to end: steps, held-out loss, checkpoints, export, report."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from apps.common.checkpoints import checkpoint_path, last_checkpoint
from apps.common.config_file import as_plain
from apps.common.export import save_export
from apps.common.ranks import init_rank
from apps.common.reporter import Reporter
from apps.common.tokens import load_tokenizer, quiet_libraries
from apps.sft.config import SftConfig
from apps.sft.data import Conversations, load_conversations
from apps.sft.fit import fit
from apps.sft.samples import Sample, batch_of
from engines import TrainEngine, build_engine
from rollout.episode import derive_seed


@dataclass(frozen=True)
class Result:
    """What a run came to: the held-out loss in nats a token, before and after."""

    loss_before: float
    loss_after: float
    seconds: float
    run_dir: Path
    steps: int


def train(config: SftConfig, model: Path, data: Path, run_dir: Path) -> Result:
    """One rank's whole run; every rank calls it. `data` is a file of conversations."""
    begun = time.perf_counter()
    init_rank(config.threads, config.seed)
    quiet_libraries()
    tokenizer = load_tokenizer(model)
    conversations = load_conversations(config.data, data, tokenizer)
    resumed = last_checkpoint(run_dir) if config.resume else None
    engine = build_engine(replace(config.engine, model=str(model)))
    done = 0
    if resumed is not None:
        done, checkpoint = resumed
        engine.load(str(checkpoint))
    log = Reporter(run_dir, as_plain(config), config.steps, "sft", resume_step=done if config.resume else None)
    with log:
        before, after = _steps(config, conversations, engine, log, done)
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
    config: SftConfig, conversations: Conversations, engine: TrainEngine, log: Reporter, done: int
) -> tuple[float, float]:
    held_out = conversations.held_out[: config.eval_conversations]
    before = after = held_out_loss(engine, held_out)
    if done == 0:
        log.step(0, {"eval/loss": before}, {"held-out loss": before})
    for line in conversations.skipped.lines():
        log.note(line)
    batch_at = batches(conversations.train, config.batch_size, config.seed)
    clock = time.perf_counter()
    for step, metrics in fit(engine, batch_at, config.objective, config.steps, start=done):
        row: dict[str, Any] = {f"train/{name}": value for name, value in metrics.items()}
        row["tokens_per_second"] = metrics["tokens"] / (time.perf_counter() - clock)
        last = step == config.steps
        if last or step % config.eval_every == 0:
            after = row["eval/loss"] = held_out_loss(engine, held_out)
        log.step(step, row, {"loss": metrics["loss"], "held-out loss": after, "tokens/s": row["tokens_per_second"]})
        if last or step % config.save_every == 0:
            engine.save(str(checkpoint_path(log.run_dir, step)))
        clock = time.perf_counter()
    return before, after


def _summary(result: Result) -> list[tuple[str, Any]]:
    return [
        ("held-out loss before", result.loss_before),
        ("held-out loss after", result.loss_after),
        ("steps", result.steps),
        ("time", f"{result.seconds:.0f} s"),
        ("open this", str(result.run_dir / "report.html")),
    ]

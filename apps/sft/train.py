"""A supervised run from start to end: steps, held-out loss, checkpoints, export, report."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from apps.common.data.tokenizer import load_tokenizer, quiet_libraries
from apps.common.run.checkpoint_saver import Saves
from apps.common.run.checkpoints import checkpoint_path
from apps.common.run.config_file import as_plain
from apps.common.run.device_memory import memory_metrics
from apps.common.run.divergence import check_loss
from apps.common.run.export import save_export
from apps.common.run.nonfinite_batch import keeping_batch
from apps.common.run.ranks import from_rank_0, init_rank
from apps.common.run.reporter import Reporter
from apps.common.run.run_dir import steps_done
from apps.sft.best_checkpoint import BEFORE, HELD_OUT, Best, best_of_before, best_path, check_best
from apps.sft.config import SftConfig
from apps.sft.data import Conversations
from apps.sft.loop import fit
from apps.sft.reading.samples import Sample, batch_of
from apps.sft.row_order import ORDER, order_of
from apps.sft.step_plan import Course, course_of
from engines import TrainEngine, build_engine
from engines.config import parse_context_parallel
from runlog import read_metrics


@dataclass(frozen=True)
class Result:
    """What a run came to: the held-out loss in nats a token, before training and of what is exported."""

    loss_before: float
    loss_after: float
    seconds: float
    run_dir: Path
    steps: int
    exported: int
    """After which step the exported weights were."""


def train(config: SftConfig, conversations: Conversations, model: Path, run_dir: Path) -> Result:
    """Run one rank's part from start to end; every rank calls it.

    Raises:
        DivergenceError, engines.NonFiniteError: the run diverged; checkpoints stay, there is no export.
        ValueError: the best weights of the run's first part can't be read, or are not those that were kept.
    """
    begun = time.perf_counter()
    init_rank(config.threads, config.seed)
    quiet_libraries()
    course = course_of(config, conversations)
    done, checkpoint = from_rank_0(steps_done(run_dir, course.steps) if config.resume else (0, None))
    told = _losses(run_dir, done)
    best = best_of_before(run_dir, done, told)
    tokenizer = load_tokenizer(model, chat=False)
    engine = build_engine(replace(config.engine, model=str(model)))
    extra = {} if checkpoint is None else engine.load(str(checkpoint))
    earlier = _Earlier(done, extra.get(BEFORE, told.get(0)), extra.get(HELD_OUT, told.get(done)), told, best)
    resume_step = done if config.resume else None
    with (
        Reporter(run_dir, as_plain(config), course.steps, "sft", resume_step, config.tracker) as log,
        Saves(engine, run_dir, config.keep_checkpoints) as saves,
        keeping_batch(run_dir),
    ):
        found = _Steps(config, conversations, course, engine, log, saves, len(tokenizer)).run(earlier)
    if config.export == "best":
        engine.load(str(best_path(run_dir)))
        check_best(run_dir, found.best, engine.state_summary()["step"])
    save_export(engine, tokenizer, run_dir / "export")
    exported = found.best.step if config.export == "best" else course.steps
    result = Result(found.before, found.losses[exported], time.perf_counter() - begun, run_dir, course.steps, exported)
    log.close(_summary(result), f"SFT, {config.recipe}")
    return result


def held_out_loss(engine: TrainEngine, samples: Sequence[Sample], rows: int = 256) -> float:
    """Return mean negative log-likelihood of the samples' trained tokens, in nats; `rows` at a time, the last what is
    left."""
    total, tokens = 0.0, 0
    for first in range(0, len(samples), rows):
        batch = batch_of([samples[i] for i in range(first, min(first + rows, len(samples)))])
        log_probs, mask = engine.forward(batch)["log_probs"].values(), batch["loss_mask"].values()
        total -= log_probs[mask].sum(dtype=torch.float64).item()
        tokens += int(mask.sum())
    return total / tokens


@dataclass(frozen=True)
class _Earlier:
    """What the earlier parts of a run came to; `before` and `here` are None where nobody evaluated, or it is lost."""

    done: int
    before: float | None
    here: float | None
    """The held-out loss after step `done`."""
    told: dict[int, float]
    """What the metrics say, by step."""
    best: Best | None


@dataclass(frozen=True)
class _Found:
    """Held-out losses: before the first step, and after steps that were evaluated; of the parts before only what is
    kept of them counts."""

    before: float
    losses: dict[int, float]

    @property
    def best(self) -> Best:
        step = min(self.losses, key=lambda step: (self.losses[step], step))
        return Best(step, self.losses[step])

    def facts(self, step: int) -> dict[str, float]:
        """Return what a checkpoint of this step says of it."""
        here = {HELD_OUT: self.losses[step]} if step in self.losses else {}
        return {BEFORE: self.before} | here


@dataclass(frozen=True)
class _Steps:
    """What the steps of a run are made of."""

    config: SftConfig
    conversations: Conversations
    course: Course
    engine: TrainEngine
    log: Reporter
    saves: Saves
    vocab_size: int

    def run(self, earlier: _Earlier) -> _Found:
        """Do the steps that are left; the held-out loss at the run's first start, and at each evaluation."""
        config, engine, log = self.config, self.engine, self.log
        for line in self.conversations.skipped.lines():
            log.note(line)
        log.note("layers compiled: {compiled}\noptimizer: {optimizer}".format_map(engine.state_summary()))
        found = self._begin(earlier)
        ahead = parse_context_parallel(config.engine.context_parallel) == 1
        clock = time.perf_counter()
        for step, metrics in fit(engine, self._batch, config.objective, self.course.steps, earlier.done, ahead):
            row: dict[str, Any] = {f"train/{name}": value for name, value in metrics.items()}
            row["train/epoch"] = min(step * config.batch_size, self.course.places) / len(self.course.mixture)
            row["tokens_per_second"] = metrics["tokens"] / (time.perf_counter() - clock)
            row |= memory_metrics(config.engine.device)
            shown: dict[str, float | int | str] = {"loss": metrics["loss"], "tokens/s": row["tokens_per_second"]}
            last = step == self.course.steps
            if last or step % config.eval_every == 0:
                row["eval/loss"] = shown["held-out loss"] = found.losses[step] = self._held_out_loss()
            log.step(step, row, shown)
            if step in found.losses:
                check_loss(step, found.losses[step], self.vocab_size)
            self.saves.look()
            if directories := self._kept(step, found):
                self._save(step, directories, found)
            clock = time.perf_counter()
        return found

    def _begin(self, earlier: _Earlier) -> _Found:
        """Return what counts of earlier parts; for a new run the held-out loss is taken now, and is its first row."""
        done, here = earlier.done, earlier.here
        found = _Found(self._held_out_loss() if earlier.before is None else earlier.before, {})
        if not done:
            self.log.step(0, {"eval/loss": found.before}, {"held-out loss": found.before})
            return found
        if here is None and done == self.course.steps:  # nothing is left to do, and what it came to is lost
            here = self._held_out_loss()
        if here is not None:
            found.losses[done] = here
        if self.config.export == "best":
            self._begin_best(earlier, found)
        return found

    def _begin_best(self, earlier: _Earlier, found: _Found) -> None:
        """Of earlier parts the kept best counts, and the step of the checkpoint, which is kept now if it is better."""
        if earlier.best is not None:
            found.losses[earlier.best.step] = earlier.best.loss
        if not found.losses:
            return
        best = found.best
        if best.step == earlier.done and best != earlier.best:
            self._save(best.step, [best_path(self.log.run_dir)], found)
        for step, loss in earlier.told.items():
            if step > 0 and loss < best.loss:
                self.log.note(f"step {step} had a held-out loss of {loss:.4f}, but its weights were not kept")

    def _batch(self, step: int) -> TensorDict:
        return batch_of([self.conversations.train[i] for i in self.course.rows(step)])

    def _held_out_loss(self) -> float:
        return held_out_loss(self.engine, self.conversations.held_out[: self.config.eval_rows])

    def _kept(self, step: int, found: _Found) -> list[Path]:
        """Return where the state after a step is to be kept: as the best before it counts as the last, if it is
        both."""
        config, run_dir = self.config, self.log.run_dir
        best = config.export == "best" and step in found.losses and found.best.step == step
        due = step == self.course.steps or step % config.save_every == 0
        return [best_path(run_dir)] * best + [checkpoint_path(run_dir, step)] * due

    def _save(self, step: int, directories: list[Path], found: _Found) -> None:
        self.saves.begin(step, directories, {ORDER: order_of(self.config, self.conversations), **found.facts(step)})


def _losses(run_dir: Path, done: int) -> dict[int, float]:
    """Return what evaluations found in the first `done` steps, from the run's metrics; none where they are lost."""
    rows = read_metrics(run_dir) if done else []
    return from_rank_0(
        {int(row["step"]): row["eval/loss"] for row in rows if "eval/loss" in row and row["step"] <= done}
    )


def _summary(result: Result) -> list[tuple[str, Any]]:
    return [
        ("held-out loss before", result.loss_before),
        ("held-out loss after", result.loss_after),
        ("exported", f"after step {result.exported}"),
        ("steps", result.steps),
        ("time", f"{result.seconds:.0f} s"),
        ("open this", str(result.run_dir / "report.html")),
    ]

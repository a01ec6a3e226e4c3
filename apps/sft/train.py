"""A supervised run from start to end: steps, held-out loss, checkpoints, export, report."""

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from apps.common.data.tokenizer import load_tokenizer, quiet_libraries
from apps.common.own_metrics import own_metrics
from apps.common.run.checkpoint_saver import CheckpointSaver
from apps.common.run.checkpoints import checkpoint_path
from apps.common.run.config_file import as_plain
from apps.common.run.device_memory import memory_metrics, memory_note
from apps.common.run.divergence import check_loss
from apps.common.run.export import save_export
from apps.common.run.idle_steps import IdleSteps
from apps.common.run.nonfinite_batch import save_batch_on_nonfinite
from apps.common.run.ranks import init_rank
from apps.common.run.reporter import Reporter
from apps.common.run.run_dir import steps_done
from apps.sft.best_checkpoint import (
    BEFORE,
    HELD_OUT,
    BestCheckpoint,
    best_checkpoint_path,
    check_best_checkpoint,
    find_best_checkpoint,
)
from apps.sft.config import SftConfig
from apps.sft.data import Conversations
from apps.sft.loop import fit, idle_reason
from apps.sft.own_rows import is_shared, read_ahead, scored_batch, step_batch
from apps.sft.reading.samples import Sample, batch_of
from apps.sft.row_order import ORDER, row_order
from apps.sft.step_plan import StepPlan, plan_steps
from engines import LocalBatch, TrainEngine, build_engine
from engines.config import parse_context_parallel
from engines.loading import LoadedModel
from runlog import read_metrics
from schedules.reporting.episode_samples import Decode, token_decoder
from schedules.runtime.collectives import broadcast_result, gather_lists, rank_and_world
from schedules.runtime.interrupts import note_termination
from seqpack.memory import ledger

SHOWN_ROWS = 4  # in the report: of the first batch, and held out at each evaluation


@dataclass(frozen=True)
class Result:
    """The result of a run: the held-out loss in nats a token, before training and of the export."""

    loss_before: float
    loss_after: float
    seconds: float
    run_dir: Path
    steps: int
    exported: int
    """After which step the exported weights were."""


def train(
    config: SftConfig, conversations: Conversations, model: Path, run_dir: Path, opened: LoadedModel | None = None
) -> Result:
    """Run one rank's part from start to end; every rank calls it.

    `opened`: the model, where this process has opened its directory already.

    Raises:
        DivergenceError, engines.NonFiniteError: the run diverged; checkpoints stay, there is no export.
        IdleRunError: so many steps in a row trained nothing as the configuration allows; likewise.
        SystemExit: SIGTERM came; the run has a checkpoint.
        ValueError: the best weights of the run's first part can't be read, or are not those that were kept.
    """
    started = time.perf_counter()
    init_rank(config.threads, config.seed)
    ledger.clear()
    quiet_libraries()
    plan = plan_steps(config, conversations)
    done, checkpoint = broadcast_result(steps_done(run_dir, plan.steps) if config.resume else (0, None))
    logged = _losses(run_dir, done)
    best = find_best_checkpoint(run_dir, done, logged)
    tokenizer = load_tokenizer(model, chat=False)
    engine = build_engine(replace(config.engine, model=str(model)), opened)
    extra = {} if checkpoint is None else engine.load(str(checkpoint))
    earlier = _Earlier(done, extra.get(BEFORE, logged.get(0)), extra.get(HELD_OUT, logged.get(done)), logged, best)
    resume_step = done if config.resume else None
    with (
        Reporter(run_dir, as_plain(config), plan.steps, "sft", resume_step, config.tracker) as log,
        CheckpointSaver(engine, run_dir, config.keep_checkpoints) as saves,
        save_batch_on_nonfinite(run_dir),
        note_termination() as terminated,
    ):
        decode = token_decoder(tokenizer)
        steps = _Steps(config, conversations, plan, engine, log, saves, len(tokenizer), decode, terminated)
        measured = steps.run(earlier)
    if config.export == "best":
        engine.load(str(best_checkpoint_path(run_dir)))
        check_best_checkpoint(run_dir, measured.best, engine.state_summary()["step"])
    save_export(engine, tokenizer, run_dir / "export")
    exported = measured.best.step if config.export == "best" else plan.steps
    result = Result(
        measured.before, measured.losses[exported], time.perf_counter() - started, run_dir, plan.steps, exported
    )
    log.close(_summary(result), f"SFT, {config.recipe}")
    return result


def held_out_loss(
    engine: TrainEngine,
    samples: Sequence[Sample],
    rows: int = 256,
    show: Callable[[TensorDict, Tensor], None] | None = None,
) -> float:
    """Return the mean negative log-likelihood of the samples' trained tokens, in nats, each times its weight.

    `rows` samples are scored at a time; `show` gets the first ones with the log-probs of their tokens.

    Raises:
        ValueError: there is no such token.
    """
    total, tokens = 0.0, 0
    for first in range(0, len(samples), rows):
        given, counted = scored_batch(engine, samples, range(first, min(first + rows, len(samples))))
        batch = given.view.to_batch() if isinstance(given, LocalBatch) else given
        scores = engine.forward(given)["log_probs"]
        if show is not None and not first:
            show(batch, scores)
        log_probs, mask = scores.values(), batch["loss_mask"].values()
        mask = mask & torch.tensor(counted).repeat_interleave(torch.tensor([len(row) for row in batch["loss_mask"]]))
        if "loss_weights" in batch.keys():  # noqa: SIM118  a TensorDict iterates over its rows
            log_probs = log_probs * batch["loss_weights"].values()
        total -= log_probs[mask].sum(dtype=torch.float64).item()
        tokens += int(mask.sum())
    if is_shared(samples):
        parts = gather_lists([(total, tokens)])
        total, tokens = math.fsum(loss for loss, _ in parts), sum(count for _, count in parts)
    if not tokens:
        raise ValueError(f"no token of the {len(samples)} held-out rows is trained: there is nothing to evaluate")
    return total / tokens


@dataclass(frozen=True)
class _Earlier:
    """The earlier parts of a run; `before` and `here` are None where nothing was evaluated, or it is lost."""

    done: int
    before: float | None
    here: float | None
    """The held-out loss after step `done`."""
    logged: dict[int, float]
    """What the metrics say, by step."""
    best: BestCheckpoint | None


@dataclass(frozen=True)
class _HeldOutLosses:
    """Held-out losses before the first step and after evaluated steps; of earlier parts only those whose weights are
    saved."""

    before: float
    losses: dict[int, float]

    @property
    def best(self) -> BestCheckpoint:
        step = min(self.losses, key=lambda step: (self.losses[step], step))
        return BestCheckpoint(step, self.losses[step])

    def facts(self, step: int) -> dict[str, float]:
        """Return what a checkpoint of this step records."""
        here = {HELD_OUT: self.losses[step]} if step in self.losses else {}
        return {BEFORE: self.before} | here


@dataclass(frozen=True)
class _Steps:
    """The parts of a run's loop."""

    config: SftConfig
    conversations: Conversations
    plan: StepPlan
    engine: TrainEngine
    log: Reporter
    saves: CheckpointSaver
    vocab_size: int
    decode: Decode
    terminated: Callable[[], bool]
    """Whether SIGTERM came."""

    def run(self, earlier: _Earlier) -> _HeldOutLosses:
        """Run the steps that are left; measure the held-out loss before the run's first step and at each evaluation."""
        config, engine, log = self.config, self.engine, self.log
        for line in self.conversations.skipped.lines():
            log.note(line)
        log.note("layers compiled: {compiled}\noptimizer: {optimizer}".format_map(engine.state_summary()))
        measured = self._begin(earlier)
        if not earlier.done:
            self._show(
                1, "training", batch_of([self.conversations.train[row] for row in self.plan.rows(0)[:SHOWN_ROWS]])
            )
        idle = IdleSteps.resumed(config.allow_idle_steps, log.run_dir, earlier.done)
        ahead = parse_context_parallel(config.engine.context_parallel) == 1
        clock = time.perf_counter()
        for step, metrics in fit(engine, self._batch, config.objective, self.plan.steps, earlier.done, ahead):
            row: dict[str, Any] = {
                name if name.startswith("proof/") else f"train/{name}": value for name, value in metrics.items()
            }
            row["train/epoch"] = min(step * config.batch_size, self.plan.places) / len(self.plan.mixture)
            row["tokens_per_second"] = metrics["tokens"] / (time.perf_counter() - clock)
            row |= memory_metrics(config.engine.device)
            shown: dict[str, float | int | str] = {"loss": metrics["loss"]} if "loss" in metrics else {}
            shown["tokens/s"] = row["tokens_per_second"]
            last = step == self.plan.steps
            if config.metric and rank_and_world()[0] == 0:
                row |= own_metrics(config.metric, config.metric_options, {"metrics": row, "step": step})
            reason = idle_reason(metrics)
            row |= idle.row(reason)
            stops = idle.too_many and not last
            ends = broadcast_result(self.terminated()) and not last
            if last or step % self.plan.eval_every == 0:
                row["eval/loss"] = shown["held-out loss"] = measured.losses[step] = self._held_out_loss(step)
            log.step(step, row, shown)
            if step == earlier.done + 1:
                log.note(memory_note(row))
            if step in measured.losses:
                check_loss(step, measured.losses[step], self.vocab_size)
            self.saves.look()
            if directories := self._directories(step, measured, last or stops or ends):
                self._save(step, directories, measured)
            if stops:
                raise idle.error(step, reason, log.run_dir)
            if ends:
                log.note(f"SIGTERM: stopped after step {step}; --resume --run-dir {log.run_dir} goes on")
                raise SystemExit(128 + signal.SIGTERM)
            clock = time.perf_counter()
        return measured

    def _begin(self, earlier: _Earlier) -> _HeldOutLosses:
        """Return the losses of earlier parts; measure the held-out loss of a new run, and log it as its first row."""
        done, here = earlier.done, earlier.here
        measured = _HeldOutLosses(self._held_out_loss(done) if earlier.before is None else earlier.before, {})
        if not done:
            self.log.step(0, {"eval/loss": measured.before}, {"held-out loss": measured.before})
            return measured
        if here is None and done == self.plan.steps:  # nothing is left to do, and what it came to is lost
            here = self._held_out_loss(done)
        if here is not None:
            measured.losses[done] = here
        if self.config.export == "best":
            self._begin_best(earlier, measured)
        return measured

    def _begin_best(self, earlier: _Earlier, measured: _HeldOutLosses) -> None:
        """Take over the saved best of earlier parts; save the checkpoint's step as the best if it is better."""
        if earlier.best is not None:
            measured.losses[earlier.best.step] = earlier.best.loss
        if not measured.losses:
            return
        best = measured.best
        if best.step == earlier.done and best != earlier.best:
            self._save(best.step, [best_checkpoint_path(self.log.run_dir)], measured)
        for step, loss in earlier.logged.items():
            if step > 0 and loss < best.loss:
                self.log.note(f"step {step} had a held-out loss of {loss:.4f}, but its weights were not kept")

    def _batch(self, step: int) -> TensorDict | LocalBatch:
        samples, objective = self.conversations.train, self.config.objective
        batch = step_batch(self.engine, samples, self.plan.rows(step), objective)
        if step + 1 < self.plan.steps:
            read_ahead(self.engine, samples, self.plan.rows(step + 1), objective)
        return batch

    def _held_out_loss(self, step: int) -> float:
        samples = self.conversations.held_out[: self.config.eval_rows]
        return held_out_loss(self.engine, samples, show=partial(self._show, step, "held-out"))

    def _show(self, step: int, split: str, batch: TensorDict, log_probs: Tensor | None = None) -> None:
        """Keep the first rows of a batch for the report, with the log-probs of their trained tokens where known."""
        for row in range(min(SHOWN_ROWS, len(batch))):
            mask = batch["loss_mask"][row]
            tokens = [self.decode(token) for token in batch["input_ids"][row].tolist()]
            told = {"step": step, "split": split, "group": row, "tokens": tokens, "mask": mask.tolist()}
            if log_probs is not None:
                told["log_probs"] = log_probs[row].masked_fill(~mask.to(log_probs.device), 0.0).tolist()
            self.log.episode(told)

    def _directories(self, step: int, measured: _HeldOutLosses, ends: bool) -> list[Path]:
        """Return where the state after a step is saved: as the best first, then as the last, if it is both; `ends`: no
        step follows."""
        config, run_dir = self.config, self.log.run_dir
        best = config.export == "best" and step in measured.losses and measured.best.step == step
        due = ends or step % config.save_every == 0
        return [best_checkpoint_path(run_dir)] * best + [checkpoint_path(run_dir, step)] * due

    def _save(self, step: int, directories: list[Path], measured: _HeldOutLosses) -> None:
        self.saves.begin(step, directories, {ORDER: row_order(self.config, self.conversations), **measured.facts(step)})


def _losses(run_dir: Path, done: int) -> dict[int, float]:
    """Return the evaluations of the first `done` steps from the run's metrics; none where they are lost."""
    rows = read_metrics(run_dir) if done else []
    return broadcast_result(
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

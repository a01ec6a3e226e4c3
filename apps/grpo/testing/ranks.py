"""Helpers of tests of fully async runs over several ranks: records and kills in the ranks' own processes.

Ranks are spawned and know nothing of what a test has changed in its process. So the tasks carry it: they are unpickled
in each rank and act there.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from apps.common.run import export
from apps.grpo import train
from apps.grpo.config import GrpoConfig
from apps.grpo.main import run
from apps.grpo.testing.recipe import SHALLOW as RECIPE
from apps.grpo.testing.recipe import AsciiTasks
from apps.grpo.testing.schedules import ASYNC, Prepare, assert_nothing_lost, note_start, nothing, small, watched
from engines import TrainEngine
from rollout.episodes.summary import AnyEpisode
from schedules.fully_async.follower import TrainBatch
from schedules.protocols import Trainer, TrainResult


@dataclass(frozen=True)
class PreparedTasks(AsciiTasks):
    """Tasks that prepare the process they arrive in.

    Rank 0 records its steps and each rank its weights; rank r runs entry r of `prepare`, a sampling process `sampler`.
    """

    run_dir: Path = field(kw_only=True)
    prepare: tuple[Prepare, ...] = field(kw_only=True)
    sampler: Prepare = field(kw_only=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.eval_prompts, self.run_dir, self.prepare, self.sampler)


def _arrived(eval_prompts: int, run_dir: Path, prepare: tuple[Prepare, ...], sampler: Prepare) -> PreparedTasks:
    if not dist.is_initialized():  # no rank: the process that samples
        sampler()
    else:
        if dist.get_rank() == 0:
            watched(run_dir)
        _tell_batches(run_dir)
        _tell_weights(run_dir)
        (prepare[dist.get_rank() : dist.get_rank() + 1] or (nothing,))[0]()
    return PreparedTasks(eval_prompts, run_dir=run_dir, prepare=prepare, sampler=sampler)


def _tell_weights(run_dir: Path) -> None:
    """Make each rank write a digest of its weights when the run exports them."""
    real = export.save_export

    def save_export(engine: TrainEngine, *arguments: Any) -> Path:
        digest = hashlib.sha256()
        for piece in engine.export_weights():
            digest.update(f"{piece.name} {piece.offset}".encode())
            digest.update(piece.flat.contiguous().view(torch.uint8).numpy().tobytes())
        (run_dir / f"weights-of-{dist.get_rank()}").write_text(digest.hexdigest())
        return real(engine, *arguments)

    train.save_export = save_export  # type: ignore[assignment, attr-defined]


def digests(run_dir: Path, ranks: int = 2) -> list[str]:
    """Return the digests that the ranks wrote at the end."""
    return [(run_dir / f"weights-of-{rank}").read_text() for rank in range(ranks)]


def on_ranks(run_dir: Path, **changes: Any) -> GrpoConfig:
    """Return the configuration of a run of four steps on two ranks, each with a whole copy of the weights."""
    engine = replace(RECIPE.config.engine, shard_ranks=1)
    settings: dict[str, Any] = {"schedule": ASYNC, "nproc_per_node": 2, "engine": engine} | changes
    return small(run_dir, **settings)


def go_on_ranks(run_dir: Path, *prepare: Prepare, sampler: Prepare = nothing, **changes: Any) -> None:
    """Run from the start, or resume the run of the folder; see `on_ranks` and `PreparedTasks`."""
    run_dir.mkdir(exist_ok=True)
    resume = note_start(run_dir)

    def make_tasks(config: GrpoConfig, tokenizer: object) -> PreparedTasks:
        del tokenizer
        return PreparedTasks(config.data.eval_prompts, run_dir=run_dir, prepare=prepare, sampler=sampler)

    run(on_ranks(run_dir, resume=resume, **changes), replace(RECIPE, make_tasks=make_tasks))


def trained_by(run_dir: Path, rank: int) -> dict[int, dict[str, Any]]:
    """Return what a rank last trained in each step: the tasks, and the oldest version that sampled a token."""
    lines = map(json.loads, _log_of(run_dir, rank).read_text().splitlines())
    return {line["step"]: {"tasks": line["tasks"], "oldest": line["oldest"]} for line in lines}


def sound(run_dir: Path, config: GrpoConfig) -> None:
    """Assert that no task is lost or repeated, and that both ranks trained the same and ended with the same weights."""
    assert_nothing_lost(run_dir, config)
    assert trained_by(run_dir, 0) == trained_by(run_dir, 1)
    assert len(set(digests(run_dir))) == 1


def _log_of(run_dir: Path, rank: int) -> Path:
    return run_dir.parent / f"{run_dir.name}-rank-{rank}.log"


def _tell_batches(run_dir: Path) -> None:
    """Make each rank record the step that it is about to train."""
    real, log = TrainBatch.train, _log_of(run_dir, dist.get_rank())

    def train_told(self: TrainBatch, trainer: Trainer, episodes: Sequence[AnyEpisode], scored: Any) -> TrainResult:
        segments = [segment for episode in episodes for segment in episode.segments]
        oldest = min(version for segment in segments for version, _ in segment.spans if version >= 0)
        with log.open("a") as file:
            tasks = [episode.task_id for episode in episodes]
            file.write(json.dumps({"step": self.step, "tasks": tasks, "oldest": oldest}) + "\n")
        return real(self, trainer, episodes, scored)

    TrainBatch.train = train_told  # type: ignore[method-assign]

"""Helpers of tests of schedules: small whole runs, recorded by a log that is independent of the ledger."""

import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from apps.common.cluster import Cluster, RolloutLayout
from apps.common.run.checkpoints import last_checkpoint
from apps.common.run.config_file import CONFIG_NAME
from apps.common.testing.process_kills import discard_output
from apps.common.testing.weight_delta import assert_trained
from apps.grpo.config import GrpoConfig
from apps.grpo.main import run
from apps.grpo.recipe import Recipe
from apps.grpo.registry import recipes
from apps.grpo.testing.recipe import SHALLOW as RECIPE
from apps.grpo.testing.recipe import AsciiTasks
from apps.quickstart.model import ensure_tiny_model, served_config
from rollout.control.staleness import Train
from schedules.config import ScheduleConfig
from schedules.fully_async import fully_async as schedule_async
from schedules.fully_async.fully_async import FullyAsyncSchedule
from schedules.one_step_off import OneStepOffSchedule
from schedules.schedule import TrainStepResult
from schedules.sync import SyncSchedule

Prepare = Callable[[], object]
"""What a process does before a run begins in it."""

SYNC = ScheduleConfig("sync")
ONE = ScheduleConfig("one_step_off")
ASYNC = ScheduleConfig("fully_async", staleness_threshold=1.0, partial_rollout=True)


def small(run_dir: Path, schedule: ScheduleConfig, **changes: Any) -> GrpoConfig:
    """Return the configuration of a run of four steps."""
    cluster = replace(RECIPE.config.cluster, schedule=schedule)
    return replace(RECIPE.config, run_dir=run_dir, cluster=cluster, **changes)


def served(run_dir: Path, layout: RolloutLayout, schedule: ScheduleConfig, **changes: Any) -> GrpoConfig:
    """Return the configuration of a run of three steps sampled by vLLM, from random weights."""
    recipe = recipes()["quickstart-vllm"].config
    return replace(
        replace(recipe, warm_start=replace(recipe.warm_start, steps=0), **changes),
        run_dir=run_dir,
        steps=3,
        prompts_per_step=8,
        group_size=4,
        eval_every=3,
        save_every=3,
        data=replace(recipe.data, eval_prompts=8),
        objective=replace(recipe.objective, off_policy="none" if schedule.mode == "sync" else "truncate"),
        cluster=Cluster(rollout=layout, schedule=schedule),
    )


def proofs(steps: list[dict[str, Any]], name: str = "weights/check/abs") -> list[float]:
    """Return the results of each weight check, from the rows of all steps.

    Where training and sampling are processes of their own, a row has the check of the weight sync before it, and the
    last row has both.
    """
    assert all(name in row for row in steps[1:])
    return [row[name] for row in steps if name in row]


def assert_timed(steps: list[dict[str, Any]]) -> None:
    """Assert that each step has the time of its weight sync, and its share of one transfer rate."""
    rates = []
    for row in steps:
        assert min(row["weights/staging_ms"], row["weights/pause_ms"], row["weights/bytes"]) > 0
        seconds = (row["weights/staging_ms"] + row["weights/pause_ms"]) / 1000
        assert seconds <= row["time/export_and_update_weights_s"]
        rates.append(row["weights/bytes"] / seconds / row["weights/link_share"])
    assert rates == pytest.approx([rates[0]] * len(steps))


def shared_config(vocab_size: int, pad_token_id: int, eos_token_id: int) -> Qwen3_5TextConfig:
    """Return the config of a model whose heads two of vLLM's workers can share."""
    config = served_config(vocab_size, pad_token_id, eos_token_id)
    config.num_key_value_heads = config.linear_num_key_heads = config.linear_num_value_heads = 2
    return config


SHARED = replace(
    recipes()["quickstart-vllm"], make_model=functools.partial(ensure_tiny_model, make_config=shared_config)
)
"""quickstart-vllm with that model."""


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return a run's metrics."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return a checkpoint's parameters."""
    return dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())


def same_weights(left: Path, right: Path) -> bool:
    """Return whether two runs ended with equal weights, bit for bit."""
    expected, actual = weights(left / "export"), weights(right / "export")
    return all(torch.equal(expected[name], actual[name]) for name in expected)


def log_of(run_dir: Path) -> Path:
    """Return the path of a run's independent log."""
    return run_dir.parent / f"{run_dir.name}-independent.log"


def watched(run_dir: Path) -> None:
    """Record every trained step of this process in a file of its own, synced to disk."""
    ahead = FullyAsyncSchedule._train

    def told_ahead(self: FullyAsyncSchedule, decision: Train, begun: float) -> TrainStepResult:
        return _told(run_dir, decision.step, ahead(self, decision, begun))

    schedule_async.FullyAsyncSchedule._train = told_ahead  # type: ignore[method-assign]
    for kind in (SyncSchedule, OneStepOffSchedule):
        kind.step = _telling(run_dir, kind.step)  # type: ignore[assignment, method-assign]


@contextmanager
def without_recording() -> Iterator[None]:
    """Restore the process afterwards, so that it records no steps."""
    ahead, steps = FullyAsyncSchedule._train, [(kind, kind.step) for kind in (SyncSchedule, OneStepOffSchedule)]
    try:
        yield
    finally:
        schedule_async.FullyAsyncSchedule._train = ahead  # type: ignore[method-assign]
        for kind, step in steps:
            kind.step = step  # type: ignore[method-assign]


def _telling(run_dir: Path, step: Callable[[Any, int], TrainStepResult]) -> Callable[[Any, int], TrainStepResult]:
    return lambda schedule, number: _told(run_dir, number + 1, step(schedule, number))


def _told(run_dir: Path, step: int, result: TrainStepResult) -> TrainStepResult:
    note(run_dir, {"step": step, "tasks": sorted({episode.task_id for episode in result.episodes})})
    return result


def note(run_dir: Path, line: dict[str, Any]) -> None:
    """Add a line to the independent log, synced to disk."""
    with log_of(run_dir).open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def note_start(run_dir: Path) -> bool:
    """Add to the independent log the step after which this run starts; return whether it resumes an earlier one."""
    resume = (run_dir / CONFIG_NAME).is_file()
    note(run_dir, {"from": (last_checkpoint(run_dir) or (0, None))[0] if resume else 0})
    return resume


def history(run_dir: Path) -> dict[int, list[str]]:
    """Return the tasks of each step of the final weights: a start drops the steps after its checkpoint."""
    steps: dict[int, list[str]] = {}
    for line in map(json.loads, log_of(run_dir).read_text().splitlines()):
        if "from" in line:
            steps = {step: tasks for step, tasks in steps.items() if step <= line["from"]}
        else:
            assert line["step"] not in steps
            steps[line["step"]] = line["tasks"]
    return steps


def assert_nothing_lost(run_dir: Path, config: GrpoConfig) -> None:
    """Assert that every step ran once, every task was trained exactly once, and all weights changed."""
    steps = history(run_dir)
    assert sorted(steps) == list(range(1, config.steps + 1))
    trained = [task for tasks in steps.values() for task in tasks]
    first, each = config.data.eval_prompts, config.prompts_per_step * config.cluster.schedule.required_batches
    assert sorted(trained) == sorted(f"number-{first + n}" for n in range(config.steps * each))
    assert [row["step"] for row in rows(run_dir)] == list(range(config.steps + 1))
    assert_trained(run_dir)


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class SampledTasks(AsciiTasks):
    """Tasks that run `sampler` in the sampling process (spawned, or an actor) when they arrive there."""

    sampler: Prepare = field(kw_only=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _sampled, (self.eval_prompts, self.sampler)


def _sampled(eval_prompts: int, sampler: Prepare) -> SampledTasks:
    sampler()
    return SampledTasks(eval_prompts, sampler=sampler)


def sampled_recipe(sampler: Prepare) -> Recipe:
    """Return the recipe of these tests with `sampler` to prepare its sampling processes."""

    def make_tasks(config: GrpoConfig, tokenizer: object) -> SampledTasks:
        del tokenizer
        return SampledTasks(config.data.eval_prompts, sampler=sampler)

    return replace(RECIPE, make_tasks=make_tasks)


def go(
    run_dir: Path, schedule: ScheduleConfig, prepare: Prepare = nothing, sampler: Prepare = nothing, **changes: Any
) -> None:
    """Run in a child, from the start or resumed; `prepare` and `sampler` prepare it and its sampling processes."""
    os.setpgid(0, 0)
    discard_output(run_dir.parent / f"{run_dir.name}.err")
    watched(run_dir)
    resume = note_start(run_dir)
    prepare()
    run(small(run_dir, schedule, resume=resume, **changes), sampled_recipe(sampler))

"""For tests of schedules: whole small runs, watched by a log that knows nothing of the ledger."""

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

from apps.common.cluster import Cluster, RolloutLayout, Schedule
from apps.common.run.checkpoints import last_checkpoint
from apps.common.run.config_file import CONFIG_NAME
from apps.common.testing.process_kills import silence
from apps.common.testing.weight_delta import assert_trained
from apps.grpo.config import GrpoConfig
from apps.grpo.main import run
from apps.grpo.recipe import Recipe
from apps.grpo.registry import recipes
from apps.grpo.schedules import fully_async as schedule_async
from apps.grpo.schedules.fully_async import FullyAsync
from apps.grpo.schedules.one_step_off import OneStepOff
from apps.grpo.schedules.sync import InTurn
from apps.grpo.step import StepResult
from apps.grpo.testing.recipe import RECIPE, BabbleTasks
from apps.quickstart.model import ensure_tiny_model, served_config
from rollout.control.staleness import Train

Prepare = Callable[[], object]
"""What a process does before a run begins in it."""

SYNC = Schedule("sync")
ONE = Schedule("one_step_off")
ASYNC = Schedule("fully_async", staleness_threshold=1.0, partial_rollout=True)


def small(run_dir: Path, schedule: Schedule, **changes: Any) -> GrpoConfig:
    """Return a run of four steps."""
    cluster = replace(RECIPE.config.cluster, schedule=schedule)
    return replace(RECIPE.config, run_dir=run_dir, cluster=cluster, **changes)


def served(run_dir: Path, layout: RolloutLayout, schedule: Schedule, **changes: Any) -> GrpoConfig:
    """Return a run of three steps sampled by vLLM, from random weights."""
    recipe = recipes()["quickstart-vllm"].config
    return replace(
        replace(recipe, warm_start=replace(recipe.warm_start, steps=0), **changes),
        run_dir=run_dir,
        steps=3,
        prompts=8,
        group_size=4,
        eval_every=3,
        save_every=3,
        data=replace(recipe.data, eval_prompts=8),
        objective=replace(recipe.objective, off_policy="none" if schedule.mode == "sync" else "truncate"),
        cluster=Cluster(rollout=layout, schedule=schedule),
    )


def proofs(steps: list[dict[str, Any]], name: str = "weights/probe/abs") -> list[float]:
    """Return what the probes of each hand-over told, by the rows of all steps; where training and sampling are
    processes that wait for nobody, a row tells of the hand-over before, and the last one of both."""
    assert all(name in row for row in steps[1:])
    return [row[name] for row in steps if name in row]


def assert_timed(steps: list[dict[str, Any]]) -> None:
    """Each step tells of its hand-over: how long it took the sampler, and at what share of one rate that was."""
    rates = []
    for row in steps:
        assert min(row["weights/staging_ms"], row["weights/pause_ms"], row["weights/bytes"]) > 0
        seconds = (row["weights/staging_ms"] + row["weights/pause_ms"]) / 1000
        assert seconds <= row["time/export_and_update_weights_s"]
        rates.append(row["weights/bytes"] / seconds / row["weights/link_share"])
    assert rates == pytest.approx([rates[0]] * len(steps))


def shared_config(vocab_size: int, pad_token_id: int, eos_token_id: int) -> Qwen3_5TextConfig:
    """Return of a model whose heads two of vLLM's workers can share."""
    config = served_config(vocab_size, pad_token_id, eos_token_id)
    config.num_key_value_heads = config.linear_num_key_heads = config.linear_num_value_heads = 2
    return config


SHARED = replace(
    recipes()["quickstart-vllm"], make_model=functools.partial(ensure_tiny_model, make_config=shared_config)
)
"""quickstart-vllm with that model."""


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return its metrics."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return a checkpoint's parameters."""
    return dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())


def same_weights(left: Path, right: Path) -> bool:
    """Return whether two runs ended with the same bits."""
    expected, found = weights(left / "export"), weights(right / "export")
    return all(torch.equal(expected[name], found[name]) for name in expected)


def log_of(run_dir: Path) -> Path:
    """Return where the independent log of a run is."""
    return run_dir.parent / f"{run_dir.name}-independent.log"


def watched(run_dir: Path) -> None:
    """From now on every step that is trained in this process is noted in a file of its own, synced to disk."""
    ahead = FullyAsync._train

    def told_ahead(self: FullyAsync, decision: Train, begun: float) -> StepResult:
        return _told(run_dir, decision.step, ahead(self, decision, begun))

    schedule_async.FullyAsync._train = told_ahead  # type: ignore[method-assign]
    for kind in (InTurn, OneStepOff):
        kind.step = _telling(run_dir, kind.step)  # type: ignore[assignment, method-assign]


@contextmanager
def unwatched() -> Iterator[None]:
    """Let this process be watched by nobody afterwards, as before."""
    ahead, steps = FullyAsync._train, [(kind, kind.step) for kind in (InTurn, OneStepOff)]
    try:
        yield
    finally:
        schedule_async.FullyAsync._train = ahead  # type: ignore[method-assign]
        for kind, step in steps:
            kind.step = step  # type: ignore[method-assign]


def _telling(run_dir: Path, step: Callable[[Any, int], StepResult]) -> Callable[[Any, int], StepResult]:
    return lambda schedule, number: _told(run_dir, number + 1, step(schedule, number))


def _told(run_dir: Path, step: int, result: StepResult) -> StepResult:
    note(run_dir, {"step": step, "tasks": sorted({episode.task_id for episode in result.episodes})})
    return result


def note(run_dir: Path, line: dict[str, Any]) -> None:
    """Add a line to the independent log, on disk."""
    with log_of(run_dir).open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def note_start(run_dir: Path) -> bool:
    """Add to the independent log after which step a run of this folder starts; whether that is one that goes on."""
    resume = (run_dir / CONFIG_NAME).is_file()
    note(run_dir, {"from": (last_checkpoint(run_dir) or (0, None))[0] if resume else 0})
    return resume


def history(run_dir: Path) -> dict[int, list[str]]:
    """Return the tasks of each step in the history of the weights that are left: a start forgets the steps after it."""
    steps: dict[int, list[str]] = {}
    for line in map(json.loads, log_of(run_dir).read_text().splitlines()):
        if "from" in line:
            steps = {step: tasks for step, tasks in steps.items() if step <= line["from"]}
        else:
            assert line["step"] not in steps
            steps[line["step"]] = line["tasks"]
    return steps


def assert_nothing_lost(run_dir: Path, config: GrpoConfig) -> None:
    """Every step once, every task of the run in exactly one of them, and weights that moved."""
    steps = history(run_dir)
    assert sorted(steps) == list(range(1, config.steps + 1))
    asked = [task for tasks in steps.values() for task in tasks]
    first, each = config.data.eval_prompts, config.prompts * config.cluster.schedule.required_batches
    assert sorted(asked) == sorted(f"number-{first + n}" for n in range(config.steps * each))
    assert [row["step"] for row in rows(run_dir)] == list(range(config.steps + 1))
    assert_trained(run_dir)


def nothing() -> None:
    """Leave the process alone."""


@dataclass(frozen=True)
class SampledTasks(BabbleTasks):
    """Tasks that prepare the process that samples, by `sampler`, where they arrive: it is spawned, or an actor, and
    knows nothing of what a test has changed in its own."""

    sampler: Prepare = field(kw_only=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _sampled, (self.eval_prompts, self.sampler)


def _sampled(eval_prompts: int, sampler: Prepare) -> SampledTasks:
    sampler()
    return SampledTasks(eval_prompts, sampler=sampler)


def sampled_recipe(sampler: Prepare) -> Recipe:
    """Return the recipe of these tests, whose sampling processes are prepared so."""

    def make_tasks(config: GrpoConfig, tokenizer: object) -> SampledTasks:
        del tokenizer
        return SampledTasks(config.data.eval_prompts, sampler=sampler)

    return replace(RECIPE, make_tasks=make_tasks)


def go(
    run_dir: Path, schedule: Schedule, prepare: Prepare = nothing, sampler: Prepare = nothing, **changes: Any
) -> None:
    """The child: a run from the start, or from where the folder stands; it and its sampling processes are prepared."""
    os.setpgid(0, 0)
    silence(run_dir.parent / f"{run_dir.name}.err")
    watched(run_dir)
    resume = note_start(run_dir)
    prepare()
    run(small(run_dir, schedule, resume=resume, **changes), sampled_recipe(sampler))

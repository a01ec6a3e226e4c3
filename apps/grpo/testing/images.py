"""Helpers of tests with pictures: a random model earns some reward, whatever samples it."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from apps.common.cluster import RolloutLayout
from apps.common.testing.weight_delta import load_tensors
from apps.grpo.config import GrpoConfig
from apps.grpo.registry import recipes
from apps.grpo.testing.schedules import shared_config
from apps.quickstart.image_tasks import ImageTasks
from apps.quickstart.vision import ensure_vision_model
from rollout import Reply, Task, TaskRow
from rollout.tools.tool import ToolResult
from rollout.tools.workers import instant
from schedules.config import ScheduleConfig


@dataclass(frozen=True)
class OddTasks(ImageTasks):
    """The same pictures with another reward: 1 for a response of an odd number of characters."""

    def environment(self, row: TaskRow) -> Task:
        """Return the task of one picture."""
        return replace(super().environment(row), reward=_odd)


@instant
def _odd(reply: Reply, results: Sequence[ToolResult]) -> float:
    del results
    return float(len(reply.content) % 2)


def make_odd_tasks(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> OddTasks:
    """Return the tasks, with as many held-out pictures as the configuration asks for."""
    del tokenizer
    return OddTasks(config.data.eval_prompts, config.seed)


NATIVE = replace(recipes()["quickstart-image"], make_tasks=make_odd_tasks)
"""quickstart-image with those tasks."""
SERVED = replace(recipes()["quickstart-image-vllm"], make_tasks=make_odd_tasks)
"""quickstart-image-vllm with those tasks."""
SHARED = replace(SERVED, make_model=functools.partial(ensure_vision_model, make_config=shared_config))
"""With a model whose heads two of vLLM's workers can share."""


def image_config(run_dir: Path, mode: str = "sync", engine: str = "vllm", **changes: Any) -> GrpoConfig:
    """Return the configuration of a run of three steps from random weights; `changes` are of its sampler's layout."""
    config = {"vllm": SERVED}.get(engine, NATIVE).config
    ahead = {"staleness_threshold": 1.0, "partial_rollout": True} if mode == "fully_async" else {}
    schedule, layout = ScheduleConfig(mode, **ahead), RolloutLayout(engine, **changes)  # type: ignore[arg-type]
    return replace(
        config,
        run_dir=run_dir,
        steps=3,
        prompts_per_step=8,
        group_size=4,
        eval_every=3,
        save_every=3,
        warm_start=replace(config.warm_start, steps=0),
        data=replace(config.data, eval_prompts=8),
        # Few answers of an untrained model are right, if any: entropy has a gradient at every step.
        objective=replace(config.objective, off_policy="none" if mode == "sync" else "truncate", entropy_coef=0.01),
        cluster=replace(config.cluster, rollout=layout, schedule=schedule),
    )


def assert_tower_moved(run_dir: Path) -> None:
    """Assert that training changed more than half of the vision tower's parameters."""
    before, after = (load_tensors(run_dir / at) for at in ("model", "export"))
    tower = [name for name in before if ".visual." in name]
    assert tower
    assert sum(not torch.equal(before[name], after[name]) for name in tower) > len(tower) / 2

"""Runs of the quickstart that are made sick on purpose: each is named within 20 steps, healthy ones are not."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import apps.grpo.step as step
import apps.quickstart.sum_tasks as sums
from apps.grpo.config import GrpoConfig, WarmStart
from apps.grpo.main import run
from apps.grpo.registry import recipes
from apps.grpo.step import GrpoTrainer
from rollout import Episode, to_batch
from runlog.health import check_health
from schedules.config import ScheduleConfig
from schedules.protocols import WeightExport
from schedules.sampling.first_batch import SamplerMismatchError
from seqpack.batches.batch import jagged

STEPS = 20
QUICKSTART = recipes()["quickstart"].config
LOWER_LR = "lower --learning-rate"


def told(run_dir: Path) -> dict[str, str]:
    """What is sick at some step, by what is told of it first."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    checks = [one for end in range(len(rows)) for one in check_health(rows[: end + 1]) if not one.healthy]
    return {one.name: one.change for one in reversed(checks)}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("healthy")
    run(replace(QUICKSTART, run_dir=run_dir, steps=STEPS, eval_every=STEPS))
    return run_dir


def again(healthy: Path, run_dir: Path, seed: int = 0) -> GrpoConfig:
    """The same run from the same warm start."""
    warm = healthy / "warm-start" / "export"
    start = replace(QUICKSTART, model=warm, warm_start=WarmStart(), seed=seed)
    return replace(start, run_dir=run_dir, steps=STEPS, eval_every=STEPS)


def ahead(healthy: Path, run_dir: Path) -> GrpoConfig:
    """The run one step off."""
    config = again(healthy, run_dir)
    return replace(config, cluster=replace(config.cluster, schedule=ScheduleConfig("one_step_off")))


def test_nothing_is_told_of_healthy_runs(healthy: Path, tmp_path: Path) -> None:
    run(again(healthy, tmp_path, seed=1))
    assert told(healthy) == told(tmp_path) == {}
    small = replace(again(healthy, tmp_path / "small", seed=2), prompts_per_step=4, group_size=4)
    run(replace(small, engine=replace(small.engine, lr=small.engine.lr / 4)))  # that of 16 answers, not of 512
    assert told(tmp_path / "small") == {}
    run(ahead(healthy, tmp_path / "ahead"))
    assert told(tmp_path / "ahead") == {}


@pytest.mark.parametrize("seed", [0, 1])
def test_thirty_times_the_learning_rate(healthy: Path, tmp_path: Path, seed: int) -> None:
    config = again(healthy, tmp_path, seed)
    run(replace(config, engine=replace(config.engine, lr=30 * config.engine.lr), allow_idle_steps=None))
    assert LOWER_LR in told(tmp_path).values()


def test_a_constant_reward(healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "exact_reward", lambda *_: 1.0)
    run(replace(again(healthy, tmp_path), allow_idle_steps=None))
    assert "share of groups without signal" in told(tmp_path)


def shift(plain: Callable[..., Any]) -> Callable[..., Any]:
    def shifted(episodes: list[Episode]) -> Any:
        batch = plain(episodes)
        batch["loss_mask"] = jagged([torch.roll(mask, -1) for mask in batch["loss_mask"].unbind()], 0)
        return batch

    return shifted


def test_a_shifted_mask(healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "to_batch", shift(to_batch))
    with pytest.raises(SamplerMismatchError, match=r"step 1: .* the sampler has another distribution"):
        run(again(healthy, tmp_path))


def test_stale_weights(healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those after the first step, under the number of each later version: no check of weights asks a sampler of this
    process."""
    plain, kept = GrpoTrainer.export_weights, list[Any]()

    def stale(self: GrpoTrainer, module_names: bool) -> WeightExport:
        pieces = copy.deepcopy(list(plain(self, module_names).pieces))
        kept.extend(() if kept else pieces)
        return WeightExport(copy.deepcopy(kept))

    monkeypatch.setattr(GrpoTrainer, "export_weights", stale)
    run(ahead(healthy, tmp_path))
    assert "distance of the sampler's log-probs from the trainer's" in told(tmp_path)


def test_hardly_any_temperature(healthy: Path, tmp_path: Path) -> None:
    """Answers of a group are equal then; a temperature of 0 is refused with the flag."""
    config = again(healthy, tmp_path)
    with pytest.raises(ValueError, match="temperature"):
        replace(config.sampling, temperature=0.0)
    run(replace(config, sampling=replace(config.sampling, temperature=0.01), allow_idle_steps=None))
    assert {"share of groups without signal", "entropy of sampled tokens, nats"} & told(tmp_path).keys()


def test_a_cut_of_the_vocabulary_is_refused(healthy: Path, tmp_path: Path) -> None:
    config = again(healthy, tmp_path)
    with pytest.raises(ValueError, match=r"--sampling\.top-p is not for you to set: the trainer scores the whole"):
        run(replace(config, sampling=replace(config.sampling, top_p=0.9)))

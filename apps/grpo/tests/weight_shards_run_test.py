"""Whole runs of two ranks that send their shards: the weights and answers of runs that gather tensors, to the bit."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apps.grpo.main import run
from apps.grpo.testing.ranks import on_ranks
from apps.grpo.testing.recipe import SHALLOW as RECIPE
from apps.grpo.testing.schedules import proofs, rows
from rollout.workers.authentication import SECRET
from schedules.config import ScheduleConfig

SHARDED: dict[str, Any] = {"engine": replace(RECIPE.config.engine, weights="sharded"), "steps": 2}


def trained(run_dir: Path, schedule: ScheduleConfig) -> str:
    """Train two steps, and return the digest of the export."""
    run(on_ranks(run_dir, schedule=schedule, **SHARDED), RECIPE)
    return hashlib.sha256((run_dir / "export/model.safetensors").read_bytes()).hexdigest()


def test_each_rank_s_sampler_gets_the_bits_of_gathered_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)  # the launcher makes one
    whole = trained(tmp_path / "whole", ScheduleConfig())
    assert trained(tmp_path / "shards", ScheduleConfig(weight_sync="shards")) == whole
    norms = [[row["train/grad_norm"] for row in rows(tmp_path / name)[1:]] for name in ("whole", "shards")]
    assert norms[0] == norms[1]
    assert len(norms[0]) == 2


def test_a_sampling_process_gets_shards_by_the_first_rank(tmp_path: Path) -> None:
    """Fully asynchronous: the second rank sends, and has no sampler; the weight checks hold."""
    schedule = ScheduleConfig("fully_async", 0.0, partial_rollout=False, weight_sync="shards")
    trained(tmp_path / "run", schedule)
    logged = rows(tmp_path / "run")[1:]
    assert [row["weights/version"] for row in logged] == [1, 2]
    assert all(0 <= distance < 1e-5 for distance in proofs(logged))


def test_torchrun_without_a_secret_is_told_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    ranks = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"set {SECRET} to the same random text"):
        run(on_ranks(tmp_path / "run", schedule=ScheduleConfig(weight_sync="shards"), **SHARDED), RECIPE)

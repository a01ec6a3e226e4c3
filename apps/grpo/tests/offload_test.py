"""`--offload`: training is in host memory while answers are sampled, and nothing else changes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import apps.grpo.build as parts
from apps.common.cluster import Cluster
from apps.common.testing.weight_delta import assert_trained
from apps.grpo.main import run
from apps.grpo.step import GrpoTrainer
from apps.grpo.testing.recipe import RECIPE
from engines import TrainEngine, build_engine, build_reference
from objectives import GRPO
from schedules.sampling.session import RolloutSession


def test_training_is_on_the_host_while_answers_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine, in steps and in evaluations, and its frozen reference always; the weights are those without."""
    made: list[Any] = []
    seen: list[list[bool]] = []

    def noted(build: Callable[..., TrainEngine]) -> Callable[..., TrainEngine]:
        def built(*args: Any, **options: Any) -> TrainEngine:
            engine = build(*args, **options)
            made.append(engine)
            return engine

        return built

    plays = RolloutSession.rollout_groups

    async def rollout_groups(self: RolloutSession, *args: Any) -> Any:
        seen.append([one._offloaded for one in made])
        return await plays(self, *args)

    monkeypatch.setattr(parts, "build_engine", noted(build_engine))
    monkeypatch.setattr(parts, "build_reference", noted(build_reference))
    monkeypatch.setattr(RolloutSession, "rollout_groups", rollout_groups)
    config = replace(RECIPE.config, objective=GRPO(kl_coef=0.1), steps=2, eval_every=1, save_every=1)
    for name, offload in (("plain", False), ("moved", True)):
        made.clear()
        seen.clear()
        run(replace(config, run_dir=tmp_path / name, cluster=Cluster(offload=offload)), RECIPE)
        assert seen == [[offload, True]] * 5  # held-out before, then two steps and their evaluations
        assert [one._offloaded for one in made] == [False, True]
    plain, moved = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("plain", "moved"))
    assert [name for name, value in plain.items() if not torch.equal(value, moved[name])] == []
    assert_trained(tmp_path / "moved")


class Held:
    """What `offloaded` asks of an engine."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.calls: list[str] = []

    def offload(self) -> None:
        self.calls.append("offload")
        if self.fails:
            raise MemoryError("the host is full")

    def onload(self) -> None:
        self.calls.append("onload")


def test_it_comes_back_where_sampling_or_moving_fails() -> None:
    engine: Any = Held()
    trainer = GrpoTrainer(RECIPE.config, engine)
    with pytest.raises(RuntimeError, match="no answers"), trainer.offloaded():
        raise RuntimeError("no answers")
    assert engine.calls == ["offload", "onload"]
    engine.fails = True
    with pytest.raises(MemoryError, match="the host is full"), trainer.offloaded():
        pytest.fail("nothing is sampled")
    assert engine.calls == ["offload", "onload"] * 2

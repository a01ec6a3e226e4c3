"""Which parts a run has, and in which order they take the device; the parts themselves are stand-ins."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

import apps.grpo.build as parts
from apps.grpo.build import RunBuilder
from apps.grpo.config import GrpoConfig, WarmStart
from apps.grpo.sampling.native import NativeBackend
from apps.grpo.sampling.source import RunSampler
from apps.grpo.testing.recipe import RECIPE, AsciiTasks
from apps.grpo.testing.schedules import ASYNC, SYNC, small
from apps.grpo.train import train
from objectives import GRPO
from rollout.testing import ScriptedEngine
from schedules.ray.follower import RayFollower, RayFollowerSession
from schedules.runtime.interrupts import Runner
from schedules.sampling.remote_sampler import RemoteSampler
from schedules.sampling.session import RolloutSession

MODEL = Path("model")
CHECKPOINT = Path("checkpoint")


class Made(NamedTuple):
    """What was made, in order, and how."""

    what: str
    how: Any


class Trained:
    """Stands for the engine."""

    reference: Any = None

    def __init__(self, made: list[Made]) -> None:
        self.made = made

    def load(self, path: str) -> None:
        self.made.append(Made("load", path))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    found: list[Made] = []

    def engine(config: Any, model: Any = None) -> Trained:
        found.append(Made("engine", config.model))
        return Trained(found)

    def reference(config: Any) -> Trained:
        found.append(Made("reference", config.model))
        return Trained(found)

    def sampler(*arguments: Any) -> RemoteSampler:
        found.append(Made("sampler", arguments[3:]))
        return RemoteSampler(arguments[3])

    def sync(self: Any, trainer: Any) -> None:
        found.append(Made("sync", trainer.engine))

    monkeypatch.setattr(parts, "build_engine", engine)
    monkeypatch.setattr(parts, "build_reference", reference)
    monkeypatch.setattr(NativeBackend, "build_sharing", sampler)
    monkeypatch.setattr(RunSampler, "chat", lambda self: None)
    monkeypatch.setattr(RolloutSession, "sync", sync)
    monkeypatch.setattr(RayFollowerSession, "sync", sync)
    return found


@pytest.fixture
def start() -> Iterator[RunBuilder]:
    with Runner() as runner:
        tasks, tokenizer = AsciiTasks(4), cast(Any, None)
        yield RunBuilder(small(Path("run"), SYNC), tasks, tokenizer, MODEL, Path("run"), 0, None, None, runner)


def parts_of(start: RunBuilder) -> parts.RunComponents:
    with ExitStack() as stack:
        return start.components(stack)


def cluster(config: GrpoConfig, **changes: Any) -> GrpoConfig:
    return replace(config, cluster=replace(config.cluster, **changes))


@pytest.mark.parametrize("apart", [None, "asked for"])
def test_a_sampler_takes_its_device_first_but_where_it_computes_with_the_engines_weights(
    made: list[Made], start: RunBuilder, monkeypatch: pytest.MonkeyPatch, apart: str | None
) -> None:
    monkeypatch.setattr(NativeBackend, "weights_apart", lambda *arguments: apart)
    found = parts_of(replace(start, done=3))
    assert [one.what for one in made] == (["engine", "sampler"] if apart is None else ["sampler", "engine"])
    sampled = made[apart is None]
    assert sampled.how == (2, found.trainer.engine if apart is None else None)


def test_whoever_has_other_weights_than_those_trained_gets_them_before_the_first_step(
    made: list[Made], start: RunBuilder
) -> None:
    """A checkpoint's, or where what samples was given; else all begin with the same."""
    parts_of(start)
    assert "sync" not in [one.what for one in made]
    made.clear()
    found = parts_of(replace(start, checkpoint=CHECKPOINT))
    assert made[-1] == Made("sync", found.trainer.engine)
    assert Made("load", str(CHECKPOINT)) in made
    made.clear()
    given = ScriptedEngine(lambda prompt, turn: [0])
    found = parts_of(replace(start, given=given))
    assert found.sampler is given
    assert made[-1] == Made("sync", found.trainer.engine)


def test_the_frozen_model_is_the_one_that_the_run_starts_from(made: list[Made], start: RunBuilder) -> None:
    """Where the KL penalty needs one; the checkpoint's weights are the trained one's alone."""
    config = replace(start.config, objective=GRPO(kl_coef=0.1))
    found = parts_of(replace(start, config=config, checkpoint=CHECKPOINT))
    assert [one for one in made if one.what in ("reference", "load")] == [
        Made("reference", str(MODEL)),
        Made("load", str(CHECKPOINT)),
    ]
    assert found.trainer.engine.reference is not None


def test_where_the_schedules_processes_sample_there_is_neither_sampler_nor_session(
    made: list[Made], start: RunBuilder
) -> None:
    found = parts_of(replace(start, config=small(Path("run"), ASYNC)))
    assert (found.sampler, found.session) == (None, None)
    assert [one.what for one in made] == ["engine"]


def test_ranks_after_the_first_follow_the_one_that_has_rays_samplers(
    made: list[Made], start: RunBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "rank_and_world", lambda: (1, 2))
    layout = replace(start.config.cluster.rollout, ray_workers=2)
    found = parts_of(replace(start, config=cluster(start.config, rollout=layout)))
    assert isinstance(found.sampler, RayFollower)
    assert isinstance(found.session, RayFollowerSession)
    assert [one.what for one in made] == ["engine"]


def test_a_warm_start_is_made_once_and_not_after_the_first_step(
    start: RunBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    warming = replace(start, config=replace(start.config, warm_start=WarmStart(steps=1)))
    monkeypatch.setattr(parts, "warm_model", lambda folder: None)
    monkeypatch.setattr(parts, "warm_start", lambda *arguments: arguments[4] / "made")
    with pytest.raises(ValueError, match="a warm start needs demonstrations"):
        warming.warmed(None)
    assert start.warmed(None) is start
    assert warming.warmed(lambda config, step: []).model == Path("run/warm-start/made").absolute()
    assert replace(warming, done=1).warmed(None).model == MODEL
    monkeypatch.setattr(parts, "warm_model", lambda folder: folder / "whole")
    assert warming.warmed(None).model == Path("run/warm-start/whole").absolute()


def test_a_sampler_of_ones_own_is_refused_beside_those_that_the_run_starts(tmp_path: Path) -> None:
    given = ScriptedEngine(lambda prompt, turn: [0])
    with pytest.raises(ValueError, match="hand no engine to train"):
        train(small(tmp_path, ASYNC), AsciiTasks(4), given, model=MODEL, run_dir=tmp_path)
    layout = replace(RECIPE.config.cluster.rollout, ray_workers=1)
    with pytest.raises(ValueError, match="hand no engine to train"):
        train(cluster(RECIPE.config, rollout=layout), AsciiTasks(4), given, model=MODEL, run_dir=tmp_path)

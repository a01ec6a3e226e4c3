"""A run whose sampler computes with training's weights in place gives the bits of one that is handed copies."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import apps.grpo.build as parts
from apps.common.cluster import Cluster
from apps.common.run.reporter import Reporter
from apps.grpo.config import GrpoConfig, WarmStart
from apps.grpo.main import run
from apps.grpo.sampling.native import NativeBackend
from apps.grpo.testing.recipe import SHALLOW as RECIPE
from engines import LoraConfig, NonFiniteError, TrainEngine, build_engine
from engines.weights.row_shards import own_part
from objectives import GRPO
from rollout import Episode, NativeEngine, SharingEngine
from schedules.config import ScheduleConfig
from schedules.sampling.session import RolloutSession
from schedules.weights.transfer_result import TransferResult

SMALL = replace(RECIPE.config, steps=3, prompts_per_step=3, group_size=3, eval_every=1, save_every=1)


class Seen(NamedTuple):
    """What a run did: answers in order with the bits of their log-probs, notes, and who trained and sampled."""

    answers: list[list[Any]]
    notes: list[str]
    engines: list[Any]
    samplers: list[NativeEngine]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen([], [], [], [])
    plays, notes, makes = RolloutSession.rollout_groups, Reporter.note, NativeBackend.build_sharing

    async def rollout_groups(self: RolloutSession, *args: Any) -> list[list[Episode]]:
        groups = await plays(self, *args)
        told = [
            (segment.ids, segment.log_probs, segment.policy_versions, segment.loss_mask)
            for group in groups
            for episode in group
            for segment in episode.segments
        ]
        found.answers.append(told)
        return groups

    def note(self: Reporter, text: str) -> None:
        found.notes.append(text)
        notes(self, text)

    def built(*args: Any, **options: Any) -> TrainEngine:
        engine = build_engine(*args, **options)
        found.engines.append(engine)
        return engine

    def made(*args: Any) -> NativeEngine:
        found.samplers.append(makes(*args))
        return found.samplers[-1]

    monkeypatch.setattr(RolloutSession, "rollout_groups", rollout_groups)
    monkeypatch.setattr(Reporter, "note", note)
    monkeypatch.setattr(parts, "build_engine", built)
    monkeypatch.setattr(NativeBackend, "build_sharing", made)
    return found


def copying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeBackend, "weights_apart", lambda self, config: "asked for")


def played(config: GrpoConfig, run_dir: Path, seen: Seen) -> tuple[list[list[Any]], dict[str, torch.Tensor]]:
    """All answers of a run, and its weights."""
    seen.answers.clear()
    run(replace(config, run_dir=run_dir), RECIPE)
    return list(seen.answers), load_file(run_dir / "export" / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def storages(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Bytes by place."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in (t.detach() for t in tensors)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}


def parameters(seen: Seen) -> tuple[dict[int, int], dict[int, int]]:
    """Of the last engine and the last sampler."""
    return storages([*seen.engines[-1].executor.model.parameters()]), storages([*seen.samplers[-1]._model.parameters()])


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        replace(SMALL, epochs=2, mini_batches=2, objective=GRPO(kl_coef=0.1)),
        replace(SMALL, engine=replace(SMALL.engine, weights="replicated", dtype="bfloat16")),
        replace(SMALL, warm_start=WarmStart(steps=4, eval_every=2, eval_prompts=4)),
    ],
    ids=["float32", "several updates", "replicated bfloat16", "warm start"],
)
def test_the_bits_are_those_of_copies(
    config: GrpoConfig, tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, log-probs and versions of every answer, trained and held out, and the weights at the end."""
    shared = played(config, tmp_path / "shared", seen)
    assert all(isinstance(sampler, SharingEngine) for sampler in seen.samplers)
    assert "the sampler computes with training's weights in place" in seen.notes
    copying(monkeypatch)
    copied = played(config, tmp_path / "copied", seen)
    assert not isinstance(seen.samplers[-1], SharingEngine)
    assert "the sampler has a copy of the weights: asked for" in seen.notes
    assert len(shared[0]) >= 2 * config.steps + 1
    assert shared[0] == copied[0]
    assert same(shared[1], copied[1])


def test_a_resumed_run_has_the_bits_of_a_straight_one(tmp_path: Path, seen: Seen) -> None:
    straight = played(SMALL, tmp_path / "straight", seen)
    first = played(replace(SMALL, steps=2), tmp_path / "run", seen)
    rest = played(replace(SMALL, resume=True), tmp_path / "run", seen)
    assert all(isinstance(sampler, SharingEngine) for sampler in seen.samplers)
    assert first[0] + rest[0] == straight[0]
    assert same(rest[1], straight[1])


def test_the_model_is_in_memory_once(tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(SMALL, steps=1)
    played(config, tmp_path / "shared", seen)
    theirs, mine = parameters(seen)
    assert mine.keys() == theirs.keys()
    size = sum(theirs.values())
    assert sum((theirs | mine).values()) == size > 100_000
    copying(monkeypatch)
    played(config, tmp_path / "copied", seen)
    theirs, mine = parameters(seen)
    assert not mine.keys() & theirs.keys()
    assert sum((theirs | mine).values()) == 2 * size


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cluster": Cluster(offload=True)}, "training's weights are in host memory while answers are sampled"),
        (
            {"cluster": Cluster(schedule=ScheduleConfig("one_step_off"))},
            "one_step_off samples by earlier weights while these are trained",
        ),
        ({"engine": replace(SMALL.engine, dtype="bfloat16")}, "weights are float32, and bfloat16 is computed with"),
        ({"engine": replace(SMALL.engine, lora=LoraConfig(rank=2))}, "adapters lie beside the weights"),
    ],
)
def test_where_it_is_not_right_there_is_a_copy_and_the_reason_is_told_once(
    changes: dict[str, Any], says: str, tmp_path: Path, seen: Seen
) -> None:
    played(replace(SMALL, steps=1, **changes), tmp_path / "run", seen)
    assert not isinstance(seen.samplers[-1], SharingEngine)
    (line,) = [note for note in seen.notes if note.startswith("the sampler ")]
    assert line.startswith(f"the sampler has a copy of the weights: {says}")


def test_weights_that_are_not_finite_end_the_run_before_an_answer(
    tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = RolloutSession.sync

    def broken(self: RolloutSession, trainer: Any) -> TransferResult:
        with torch.no_grad():
            own_part(trainer.engine.executor.model.model.norm.weight).part[0] = torch.inf
        return sync(self, trainer)

    monkeypatch.setattr(RolloutSession, "sync", broken)
    with pytest.raises(NonFiniteError, match=r"model\.norm\.weight has values that are not finite"):
        played(SMALL, tmp_path / "run", seen)
    assert len(seen.answers) == 2  # held-out before the first step, and its own
    assert seen.samplers[-1].version == 0

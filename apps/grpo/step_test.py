"""The step as arithmetic: which rows are trained in which update, on what, and what is said about it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from apps.common.cluster import Cluster
from apps.grpo.config import GrpoConfig
from apps.grpo.sampling.source import rollout_settings
from apps.grpo.step import GrpoTrainer, advantages_of, episode_advantages, train_on
from apps.grpo.testing.recipe import RECIPE
from objectives import GRPO
from objectives.advantages import estimate
from objectives.off_policy import Correction
from rollout import Episode, Score, Segment, to_batch
from rollout.sync.rate import copy_rate
from rollout.sync.transfer import TransferTimes
from schedules import sync as module
from schedules.config import ScheduleConfig
from schedules.reporting.episode_metrics import episode_metrics, reward_metrics
from schedules.sampling.first_batch import FirstBatch
from schedules.sampling.memory_turns import run_pending_checks
from schedules.sampling.session import PendingCheck
from schedules.sampling.settings import RolloutSettings
from schedules.sync import sync_step
from schedules.weights.sampler_bound import SamplerBound, sampler_bound
from schedules.weights.transfer_result import TransferResult
from seqpack import index_select
from seqpack.batches.batch import jagged

CONFIG = replace(RECIPE.config, prompts_per_step=2, group_size=3)
REWARDS = (1.0, 0.0, 0.5, 0.25, 0.25, 0.25)


def episodes() -> list[Episode]:
    """Six answers to two prompts, of 2 to 7 tokens, some sampled by an older policy."""
    made = []
    for index, reward in enumerate(REWARDS):
        length = 2 + index
        sampled = [t > 0 and (t != 3) for t in range(length)]
        segment = Segment(
            ids=tuple(range(10 * index, 10 * index + length)),
            loss_mask=tuple(sampled),
            log_probs=tuple(-0.5 * t if on else 0.0 for t, on in enumerate(sampled)),
            policy_versions=tuple((index % 3) if on else -1 for on in sampled),
        )
        made.append(episode(reward, index // 3, (segment,)))
    return made


def episode(reward: float | None, group: int, segments: tuple[Segment, ...] = (), attempt: int = 0) -> Episode:
    score, error = (None, "lost") if reward is None else (Score(reward), None)
    return Episode("t/0/0", "t", attempt, segments, score, "failed" if error else "done", error=error, group=group)


@dataclass
class Recorder:
    """An engine that trains nothing and keeps what it was given."""

    scored: list[list[int]] = field(default_factory=list)
    trained: list[dict[str, list[Any]]] = field(default_factory=list)
    objectives: list[object] = field(default_factory=list)
    checked: tuple[int, ...] = ()

    def forward(self, batch: TensorDict) -> dict[str, Any]:
        self.scored.append(batch["reward"].tolist())
        return {"log_probs": jagged([-(row.float() + 1) for row in batch["input_ids"].unbind()])}

    def train_batch(self, batch: TensorDict, objective: Any) -> dict[str, float]:
        columns = {"input_ids", "advantages", "old_log_probs"} & set(batch.keys())
        self.trained.append({key: [row.tolist() for row in batch[key].unbind()] for key in columns})
        self.trained[-1]["episode"] = batch["episode"].tolist()
        self.objectives.append(objective)
        number = float(len(self.trained))
        means = {"loss": 10 * number, "step": number, "mismatch/abs": number / 2, "mismatch/abs/max": 7 - number}
        return means | ({"proof/log_prob_difference": number} if number in self.checked else {})


def recorder() -> Any:
    """One in an engine's place."""
    return Recorder()


def rows_trained(engine: Recorder) -> list[list[int]]:
    """By update, the rows: a row's first token is ten times its number."""
    return [[row[0] // 10 for row in update["input_ids"]] for update in engine.trained]


def batch_with_advantages() -> TensorDict:
    batch = to_batch(episodes())
    batch["advantages"] = advantages_of(batch, CONFIG, 0)
    return batch


def test_one_update_is_on_policy_and_sees_the_whole_batch() -> None:
    batch = batch_with_advantages()
    engine = recorder()
    metrics = train_on(batch, CONFIG, engine)
    assert rows_trained(engine) == [[0, 1, 2, 3, 4, 5]]
    assert engine.scored == []
    assert "old_log_probs" not in engine.trained[0]
    assert engine.trained[0]["advantages"] == [row.tolist() for row in batch["advantages"].unbind()]
    assert engine.objectives == [replace(CONFIG.objective, off_policy="none")]
    assert metrics == {
        "train/loss": 10.0,
        "train/step": 1.0,
        "train/updates": 1.0,
        "train/nonzero_advantages": pytest.approx(3 / 17),  # of the first two answers
        "log_prob_difference": 0.5,
        "log_prob_difference_max": 6.0,
    }


@pytest.mark.parametrize(("asked", "holds"), [(None, "mask"), ("none", "none"), ("truncate", "truncate")])
def test_what_is_sampled_ahead_is_weighed_unless_weights_are_named(asked: Correction | None, holds: Correction) -> None:
    engine = recorder()
    config = replace(CONFIG, cluster=Cluster(schedule=ScheduleConfig("fully_async")), objective=GRPO(off_policy=asked))
    train_on(batch_with_advantages(), config, engine)
    assert engine.objectives == [GRPO(off_policy=holds)]


@pytest.mark.parametrize(("epochs", "parts"), [(2, 1), (1, 2), (3, 4)])
def test_later_updates_know_the_policy_that_the_batch_started_from(epochs: int, parts: int) -> None:
    batch = batch_with_advantages()
    engine = recorder()
    metrics = train_on(batch, replace(CONFIG, epochs=epochs, mini_batches=parts), engine)
    assert engine.scored == [list(REWARDS)]
    updates = rows_trained(engine)
    assert len(updates) == epochs * parts
    for begin in range(0, len(updates), parts):
        epoch = updates[begin : begin + parts]
        assert sorted(row for part in epoch for row in part) == [0, 1, 2, 3, 4, 5]
        assert all(part == sorted(part) for part in epoch)
        assert max(map(len, epoch)) - min(map(len, epoch)) <= 1
    for update in engine.trained:
        assert update["old_log_probs"] == [[-(token + 1.0) for token in row] for row in update["input_ids"]]
    count = epochs * parts
    assert metrics["train/updates"] == count
    assert metrics["train/loss"] == pytest.approx(10 * (count + 1) / 2)
    assert metrics["log_prob_difference"] == pytest.approx((count + 1) / 4)
    assert metrics["log_prob_difference_max"] == 6.0
    assert not any("mismatch" in name for name in metrics)


def test_the_check_of_some_updates_is_told_as_it_was_found() -> None:
    engine = recorder()
    engine.checked = (2, 3)
    metrics = train_on(batch_with_advantages(), replace(CONFIG, mini_batches=4), engine)
    assert metrics["proof/log_prob_difference"] == 3.0
    assert metrics["train/updates"] == 4.0


def test_mini_batches_take_every_other_row() -> None:
    """Each gets answers of every prompt, however the prompts are sorted."""
    engine = recorder()
    train_on(batch_with_advantages(), replace(CONFIG, mini_batches=2), engine)
    assert rows_trained(engine) == [[0, 2, 4], [1, 3, 5]]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=9), st.integers(1, 5), st.data())
def test_a_mini_batch_has_all_rows_of_an_episode(
    rows_of_episodes: list[int], mini_batches: int, data: st.DataObject
) -> None:
    """Episodes of several rows, in any order of rows: each is in one part, and the parts hold about as many."""
    pieces = [e.segments[0] for e in episodes()]
    rows = [episode(1.0, 0, tuple(pieces[i % 6] for i in range(count))) for count in rows_of_episodes]
    batch = to_batch(rows)
    batch = index_select(batch, data.draw(st.permutations(list(range(len(batch["reward"]))))))
    batch["advantages"] = advantages_of(batch, replace(CONFIG, advantage="reinforce_plus_plus"), 0)
    engine = recorder()
    train_on(batch, replace(CONFIG, mini_batches=mini_batches), engine)
    parts = [update["episode"] for update in engine.trained]
    assert sorted(n for part in parts for n in part) == sorted(batch["episode"].tolist())
    assert sum(len(set(part)) for part in parts) == len(rows_of_episodes)
    sizes = [len(set(part)) for part in parts]
    assert len(parts) == min(mini_batches, len(rows_of_episodes))
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_advantages_are_the_estimators(name: str) -> None:
    batch = to_batch(episodes())
    got = advantages_of(batch, replace(CONFIG, advantage=name), 3)
    want = estimate(batch, name)
    assert [row.tolist() for row in got.unbind()] == [row.tolist() for row in want.unbind()]
    assert any(any(row.tolist()) for row in got.unbind()[:3])
    assert not any(any(row.tolist()) for row in got.unbind()[3:])  # the second group's rewards are equal


def test_the_control_deals_the_same_advantages_to_other_answers() -> None:
    batch = to_batch(episodes())
    control = replace(CONFIG, control_run="shuffled-advantages")

    def scores(config: GrpoConfig, step: int) -> list[float]:
        rows = zip(advantages_of(batch, config, step).unbind(), batch["loss_mask"].unbind(), strict=True)
        values = []
        for row, mask in rows:
            assert row[~mask].eq(0).all()
            (value,) = set(row[mask].tolist())
            values.append(value)
        return values

    plain = scores(CONFIG, 0)
    dealt = [scores(control, step) for step in range(8)]
    assert all(sorted(values) == sorted(plain) for values in dealt)
    assert any(values != plain for values in dealt)
    assert len({tuple(values) for values in dealt}) > 1
    assert dealt[3] == scores(control, 3)
    assert any(scores(replace(control, seed=9), step) != dealt[step] for step in range(8))


def test_the_control_deals_an_advantage_to_an_episode_not_to_its_rows() -> None:
    one, two, *rest = episodes()
    both = replace(one, segments=(*one.segments, *two.segments))
    batch = to_batch([both, two, *rest])
    control = replace(CONFIG, control_run="shuffled-advantages")
    for step in range(8):
        first, second = (row[-1].item() for row in advantages_of(batch, control, step).unbind()[:2])
        assert first == second


def test_episodes_of_several_rows_and_failed_ones() -> None:
    one, two, *rest = episodes()
    given = [replace(one, segments=(*one.segments, *two.segments)), two, episode(None, 0, attempt=1), *rest[1:]]
    batch = to_batch(given)
    batch["advantages"] = advantages_of(batch, CONFIG, 0)
    found = episode_advantages(batch, len(given))
    expected = estimate(to_batch([one, two, *rest[1:]]), "grpo")
    assert found[:3] == pytest.approx([*(row[-1].item() for row in expected.unbind()[:2]), 0.0])
    assert reward_metrics(given)["reward"] == pytest.approx((1.0 + 0.0 + 3 * 0.25) / 5)


def test_reward_metrics_by_hand() -> None:
    rewards = [[1.0, 0.5], [0.0, 1.0], [0.0, 0.0], [0.75, 0.75]]
    assert reward_metrics([episode(r, group) for group, some in enumerate(rewards) for r in some]) == {
        "reward": pytest.approx(4.0 / 8),
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/solved_groups": pytest.approx(2 / 4),
        "reward/mixed_groups": pytest.approx(2 / 4),
    }


@dataclass
class Sampler:
    version: int = 5


@dataclass
class Session:
    """Answers by step; the order of what happens is kept."""

    events: list[object]
    sampled: list[Episode] = field(default_factory=episodes)
    sampler: Sampler = field(default_factory=Sampler)
    settings: RolloutSettings = field(default_factory=lambda: rollout_settings(CONFIG))
    check: PendingCheck = field(default_factory=PendingCheck)
    first: FirstBatch = field(default_factory=FirstBatch)

    def bounds(self) -> list[SamplerBound]:
        return [sampler_bound("float32")]

    def sample(self, step: int) -> Any:
        self.events.append(("sample", step))
        return self.sampled

    def environment_of(self, task_id: str) -> None:
        return None

    def sync(self, trainer: Any) -> TransferResult:
        self.events.append(("sync", len(trainer.engine.trained)))
        self.sampler.version += 1
        return TransferResult(4096, TransferTimes(0.5, 0.25))

    def sample_checks(self, prompts: Sequence[Any], media: Sequence[Any]) -> list[Any]:
        assert media == [None] * len(prompts)
        self.events.append(("probed", self.sampler.version, len(prompts)))
        return []


def test_a_step_samples_trains_and_hands_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 103.0, 110.0, 115.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    events: list[object] = []
    engine = recorder()
    session: Any = Session(events)
    config = replace(CONFIG, control_run="shuffled-advantages")
    spans: list[Any] = []
    timeline: Any = SimpleNamespace(add=lambda *span: spans.append(span))
    result = sync_step(session, GrpoTrainer(config, engine), 7, timeline)
    assert spans == [
        ("sampler", "sample", 100.0, 103.0),
        ("trainer", "train", 103.0, 110.0),
        ("weights", "sync", 110.0, 115.0),
    ]
    assert events == [("sample", 7), ("sync", 1), ("probed", 6, 2)]
    batch = to_batch(episodes())
    want = advantages_of(batch, config, 7)
    assert engine.trained[0]["advantages"] == [row.tolist() for row in want.unbind()]
    assert result.episodes == episodes()
    rows = [row[mask] for row, mask in zip(want.unbind(), batch["loss_mask"].unbind(), strict=True)]
    assert result.advantages == pytest.approx([row[0].item() for row in rows])
    shuffled = torch.cat(rows)
    lengths = [len(e.segments[0].ids) for e in episodes()]
    sampled = sum(e.sampled for e in episodes())
    expected = {
        **train_on(batch_with_advantages(), CONFIG, recorder()),
        **reward_metrics(episodes()),
        **episode_metrics(episodes()),
        "train/nonzero_advantages": pytest.approx((shuffled != 0).float().mean().item()),
        "rollout/episodes": 6.0,
        "rollout/tokens": float(sum(lengths)),
        "rollout/sampled_tokens": float(sampled),
        "rollout/policy_version": 2.0,
        "rollout/failed_episodes": 0.0,
        "rollout/retried_episodes": 0.0,
        "weights/version": 6.0,
        "weights/bytes": 4096.0,
        "weights/pause_ms": 250.0,
        "weights/staging_ms": 500.0,
        "weights/link_share": 4096 / 0.75 / copy_rate(4096, torch.device("cpu")),
        "time/rollout_s": 3.0,
        "time/train_s": 7.0,
        "time/export_and_update_weights_s": 5.0,
        "time/step_s": 15.0,
        "tokens_per_second": sum(lengths) / 15.0,
    }
    assert result.metrics == pytest.approx(expected)


def test_weights_of_a_resume_or_a_replaced_sampler_are_proven_before_they_are_trained_away() -> None:
    """By the prompts of the step, once; what nothing has proven is not forgotten where nothing was sampled."""
    events: list[object] = []
    session: Any = Session(events, check=PendingCheck(pending=True))
    sync_step(session, GrpoTrainer(CONFIG, recorder()), 7)
    assert events == [("sample", 7), ("probed", 5, 2), ("sync", 1), ("probed", 6, 2)]
    assert not session.check.pending
    session.check.pending = True
    run_pending_checks(session, GrpoTrainer(CONFIG, recorder()), [])
    assert session.check.pending


def test_a_sampler_that_sleeps_is_asked_once_a_step_while_it_is_awake() -> None:
    events: list[object] = []
    settings = replace(rollout_settings(CONFIG), sleep=True)
    session: Any = Session(events, settings=settings, check=PendingCheck(pending=True))
    trainer = GrpoTrainer(CONFIG, recorder())
    sync_step(session, trainer, 7)
    assert events == [("sample", 7), ("probed", 5, 2), ("sync", 1)]
    assert not session.check.pending
    sync_step(session, trainer, 8)
    assert events[3:] == [("sample", 8), ("sync", 2)]


def test_failed_and_retried_episodes_are_counted() -> None:
    one, two, *rest = episodes()
    sampled = [replace(one, attempt=1), replace(two, attempt=2), episode(None, 0), *rest[1:]]
    session: Any = Session([], sampled)
    result = sync_step(session, GrpoTrainer(CONFIG, recorder()), 0)
    assert result.metrics["rollout/retried_episodes"] == 2.0
    assert result.metrics["rollout/failed_episodes"] == 1.0

"""The step as arithmetic: which rows are trained in which update, on what, and what is said about it."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch

from apps.grpo import step as module
from apps.grpo.step import advantages_of, grpo_step, reward_metrics, train_on
from apps.grpo.testing import RECIPE
from objectives.advantages import estimate
from rollout import Trajectory, to_batch
from seqpack.batches.batch import jagged

CONFIG = replace(RECIPE.config, prompts=2, group_size=3)
REWARDS = (1.0, 0.0, 0.5, 0.25, 0.25, 0.25)


def trajectories() -> list[Trajectory]:
    """Six answers to two prompts, of 2 to 7 tokens, some sampled by an older policy."""
    made = []
    for index, reward in enumerate(REWARDS):
        length = 2 + index
        sampled = [t > 0 and (t != 3) for t in range(length)]
        made.append(
            Trajectory(
                ids=tuple(range(10 * index, 10 * index + length)),
                loss_mask=tuple(sampled),
                log_probs=tuple(-0.5 * t if on else 0.0 for t, on in enumerate(sampled)),
                policy_versions=tuple((index % 3) if on else -1 for on in sampled),
                reward=reward,
                group=index // 3,
            )
        )
    return made


@dataclass
class Recorder:
    """An engine that trains nothing and keeps what it was given."""

    scored: list[list[int]] = field(default_factory=list)
    trained: list[dict[str, list]] = field(default_factory=list)
    objectives: list[object] = field(default_factory=list)

    def forward(self, batch):
        self.scored.append(batch["reward"].tolist())
        return {"log_probs": jagged([-(row.float() + 1) for row in batch["input_ids"].unbind()])}

    def train_batch(self, batch, objective):
        columns = {"input_ids", "advantages", "old_log_probs"} & set(batch.keys())
        self.trained.append({key: [row.tolist() for row in batch[key].unbind()] for key in columns})
        self.objectives.append(objective)
        number = float(len(self.trained))
        return {"loss": 10 * number, "step": number, "mismatch/abs": number / 2, "mismatch/abs/max": 7 - number}


def rows_trained(engine: Recorder) -> list[list[int]]:
    """By update, the rows: a row's first token is ten times its number."""
    return [[row[0] // 10 for row in update["input_ids"]] for update in engine.trained]


def batch_with_advantages():
    batch = to_batch(trajectories())
    batch["advantages"] = advantages_of(batch, CONFIG, 0)
    return batch


def test_one_update_is_on_policy_and_sees_the_whole_batch():
    batch, engine = batch_with_advantages(), Recorder()
    metrics = train_on(batch, CONFIG, engine)
    assert rows_trained(engine) == [[0, 1, 2, 3, 4, 5]]
    assert engine.scored == []
    assert "old_log_probs" not in engine.trained[0]
    assert engine.trained[0]["advantages"] == [row.tolist() for row in batch["advantages"].unbind()]
    assert engine.objectives == [CONFIG.objective]
    assert metrics == {
        "train/loss": 10.0,
        "train/step": 1.0,
        "train/updates": 1.0,
        "log_prob_difference": 0.5,
        "log_prob_difference_max": 6.0,
    }


@pytest.mark.parametrize(("epochs", "parts"), [(2, 1), (1, 2), (3, 4)])
def test_later_updates_know_the_policy_that_the_batch_started_from(epochs, parts):
    batch, engine = batch_with_advantages(), Recorder()
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


def test_mini_batches_take_every_other_row():
    """Each gets answers of every prompt, however the prompts are sorted."""
    engine = Recorder()
    train_on(batch_with_advantages(), replace(CONFIG, mini_batches=2), engine)
    assert rows_trained(engine) == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "leave_one_out"])
def test_advantages_are_the_estimators(name):
    batch = to_batch(trajectories())
    got = advantages_of(batch, replace(CONFIG, advantage=name), 3)
    want = estimate(batch, name)
    assert [row.tolist() for row in got.unbind()] == [row.tolist() for row in want.unbind()]
    assert any(any(row.tolist()) for row in got.unbind()[:3])
    assert not any(any(row.tolist()) for row in got.unbind()[3:])  # the second group's rewards are equal


def test_the_control_deals_the_same_advantages_to_other_answers():
    batch = to_batch(trajectories())
    control = replace(CONFIG, control="shuffled-advantages")

    def scores(config, step):
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


def test_reward_metrics_by_hand():
    rewards = torch.tensor([[1.0, 0.5], [0.0, 1.0], [0.0, 0.0], [0.75, 0.75]])
    assert reward_metrics(rewards) == {
        "reward": pytest.approx(4.0 / 8),
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
    sampler: Sampler = field(default_factory=Sampler)

    def sample(self, step):
        self.events.append(("sample", step))
        return trajectories()

    def sync(self, engine):
        self.events.append(("sync", len(engine.trained)))
        self.sampler.version += 1
        return 4096


def test_a_step_samples_trains_and_hands_over(monkeypatch):
    clock = iter([100.0, 103.0, 110.0, 115.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    events: list[object] = []
    engine, config = Recorder(), replace(CONFIG, control="shuffled-advantages")
    result = grpo_step(config, Session(events), engine, 7)
    assert events == [("sample", 7), ("sync", 1)]
    batch = to_batch(trajectories())
    want = advantages_of(batch, config, 7)
    assert engine.trained[0]["advantages"] == [row.tolist() for row in want.unbind()]
    assert result.trajectories == trajectories()
    rows = zip(want.unbind(), batch["loss_mask"].unbind(), strict=True)
    assert result.advantages == pytest.approx([row[mask][0].item() for row, mask in rows])
    lengths = [len(t.ids) for t in trajectories()]
    sampled = sum(sum(t.loss_mask) for t in trajectories())
    expected = {
        **train_on(batch_with_advantages(), CONFIG, Recorder()),
        **reward_metrics(torch.tensor(REWARDS).view(2, 3)),
        "rollout/tokens": float(sum(lengths)),
        "rollout/sampled_tokens": float(sampled),
        "rollout/policy_version": 2.0,
        "weights/version": 6.0,
        "weights/bytes": 4096.0,
        "time/rollout_s": 3.0,
        "time/train_s": 7.0,
        "time/export_and_update_weights_s": 5.0,
        "time/step_s": 15.0,
        "tokens_per_second": sum(lengths) / 15.0,
    }
    assert result.metrics == pytest.approx(expected)

"""Rewards that a run shapes, and tokens that it chooses, by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from apps.grpo.config import RewardShaping
from apps.grpo.shaping import shape
from apps.grpo.step import advantages_of, train_on
from apps.grpo.step_test import CONFIG, REWARDS, batch_with_advantages, episodes, recorder
from objectives import GRPO
from objectives.advantages import gdpo, per_token, turn_grpo
from objectives.covariance_losses import high_covariance
from objectives.token_advantages import at_turn_ends
from rollout import Score, to_batch
from schedules.config import FilterGroups
from seqpack.batches.batch import jagged


@pytest.mark.parametrize("advantage", ["dr_grpo", "reinforce_plus_plus"])
def test_rewards_are_shaped_before_answers_are_compared(advantage: str) -> None:
    """Lengths and KL by hand; the answer that was cut off counts for its group, and trains nothing."""
    made = [replace(one, end="max_tokens" if place == 2 else "done") for place, one in enumerate(episodes())]
    shaping = RewardShaping(overlong_buffer=4, overlong_filter=True, length_reward=0.5, kl_in_reward=0.1)
    sampling = replace(CONFIG.sampling, max_new_tokens=6)
    config = replace(CONFIG, max_turns=1, sampling=sampling, shaping=shaping, advantage=advantage)
    engine = recorder()
    engine.reference = SimpleNamespace(
        forward=lambda batch: {"log_probs": jagged([-1.5 * (x.float() + 1) for x in batch["input_ids"].unbind()])},
        onload=lambda: None,
        offload=lambda: None,
    )
    batch = to_batch(made)
    shape(batch, made, config, engine)
    groups, sampled = [0, 0, 0, 1, 1, 1], [[t for t in range(1, 2 + i) if t != 3] for i in range(6)]
    wanted, costs = [], []
    for i, reward in enumerate(REWARDS):
        of_group = [len(sampled[j]) for j in range(6) if groups[j] == groups[i]]
        share = 0.5 - (len(sampled[i]) - min(of_group)) / (max(of_group) - min(of_group))
        late = min(1, max(0, (len(sampled[i]) - 2) / 4))
        wanted.append(reward + 0.5 * (share if reward > 0 else min(0, share)) - late)
        costs.append([0.1 * 0.5 * (10 * i + t + 1) for t in ([] if i == 2 else sampled[i])])
    per_answer = advantage == "dr_grpo"
    taken = [x - sum(cost) * per_answer for x, cost in zip(wanted, costs, strict=True)]
    assert batch["reward"].tolist() == pytest.approx(taken, rel=1e-5)
    found = advantages_of(batch, config, 0).unbind()
    if per_answer:
        means = [sum(taken[3 * g : 3 * g + 3]) / 3 for g in (0, 1)]
        rows = [[taken[i] - means[groups[i]]] * len(costs[i]) for i in range(6)]
    else:
        returns = [[wanted[i] - sum(cost[k:]) for k in range(len(cost))] for i, cost in enumerate(costs)]
        every = torch.tensor([x for row in returns for x in row], dtype=torch.float64)
        rows = [[float((x - every.mean()) / (every.std() + 1e-6)) for x in row] for row in returns]
    for place, row in enumerate(found):
        assert row[batch["loss_mask"].unbind()[place]].tolist() == pytest.approx(rows[place], rel=1e-4)
    assert not found[2].any()


def test_tokens_of_high_covariance_are_those_of_the_policy_that_the_step_started_from() -> None:
    batch, engine = batch_with_advantages(), recorder()
    chosen: list[Any] = []
    train_batch = engine.train_batch

    def seen(part: TensorDict, objective: Any) -> dict[str, float]:
        chosen.append(part["high_covariance"].values())
        found: dict[str, float] = train_batch(part, objective)
        return found

    engine.train_batch = seen
    train_on(batch, replace(CONFIG, mini_batches=2, objective=GRPO("kl_cov", covariance_share=0.3)), engine)
    want = high_covariance(batch["advantages"], batch["old_log_probs"], batch["loss_mask"], 0.3).values()
    assert int(want.sum()) == int(0.3 * int(batch["loss_mask"].values().sum())) > 1
    assert sum(int(x.sum()) for x in chosen) == int(want.sum())
    with pytest.raises(ValueError, match="kl_cov is the policy gradient with one update a batch"):
        replace(CONFIG, objective=GRPO("kl_cov"))


def test_gdpo_compares_each_reward_component_of_its_own() -> None:
    """By hand: the sum of both components' GRPO advantages, then over its spread; their order in a score is free."""
    parts = [(1.0, 10.0), (0.0, 10.0), (0.5, 40.0), (0.25, 0.0), (0.25, 5.0), (1.0, 0.0)]
    made = [
        replace(one, score=Score(a + b, {"form": a, "answer": b} if place % 2 else {"answer": b, "form": a}))
        for place, (one, (a, b)) in enumerate(zip(episodes(), parts, strict=True))
    ]
    config = replace(CONFIG, advantage="gdpo")
    batch = to_batch(made)
    shape(batch, made, config, recorder())
    columns = torch.tensor(parts, dtype=torch.float64)
    groups = [columns[:3], columns[3:]]
    total = torch.cat([((x - x.mean(0)) / (x.std(0) + 1e-6)).sum(1) for x in groups])
    want = (total - total.mean()) / (total.std() + 1e-6)
    for row, mask, value in zip(
        advantages_of(batch, config, 0).unbind(), batch["loss_mask"].unbind(), want.tolist(), strict=True
    ):
        assert row[mask].tolist() == pytest.approx([value] * int(mask.sum()), rel=1e-5)
    with pytest.raises(ValueError, match="the same of every answer: there are answer, form and none"):
        shape(batch, [replace(made[0], score=Score(1.0)), *made[1:]][::-1], config, recorder())
    with pytest.raises(
        ValueError, match="--length-reward changes the reward, and --advantage gdpo reads its components"
    ):
        replace(config, shaping=RewardShaping(length_reward=0.5))


def test_reward_weights_make_the_reward_of_its_components_or_weigh_their_advantages() -> None:
    parts = [(1.0, 10.0), (0.0, 10.0), (0.5, 40.0), (0.25, 0.0), (0.25, 5.0), (1.0, 0.0)]
    made = [
        replace(one, score=Score(-7.0, {"form": a, "answer": b})) for one, (a, b) in zip(episodes(), parts, strict=True)
    ]
    shaping = RewardShaping(reward_weights=("form=2", "answer=0.5"))
    config = replace(CONFIG, advantage="dr_grpo", shaping=shaping)
    batch = to_batch(made)
    shape(batch, made, config, recorder())
    assert batch["reward"].tolist() == pytest.approx([2 * a + 0.5 * b for a, b in parts])
    weighed = to_batch(made)
    shape(weighed, made, replace(config, advantage="gdpo"), recorder())
    want = per_token(gdpo(torch.tensor(parts), weighed["group"], (2.0, 0.5)), weighed["loss_mask"])
    for row, other in zip(
        advantages_of(weighed, replace(config, advantage="gdpo"), 0).unbind(), want.unbind(), strict=True
    ):
        torch.testing.assert_close(row, other)
    with pytest.raises(ValueError, match="--reward-weights: there is no reward component 'style', only answer, form"):
        shape(batch, made, replace(config, shaping=RewardShaping(reward_weights=("style=1",))), recorder())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("form",), "--reward-weights 'form' is not NAME=VALUE, such as correct=2"),
        (("form=heavy",), "--reward-weights: the weight of form must be a finite number"),
        (("form=1e999",), "--reward-weights: the weight of form must be a finite number"),
        (("form=1", "form=2"), "--reward-weights names form twice"),
    ],
)
def test_weights_that_are_none_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardShaping(reward_weights=words)


def test_turn_grpo_learns_from_the_rewards_of_turns() -> None:
    """The episodes of these tests have a call between two turns but for the shortest; turns without a reward get 0."""
    given = [(1.0,), (0.0,), (0.5,), (0.0, 1.0), (1.0,), ()]
    made = [replace(one, score=Score(9.0, turn_rewards=turns)) for one, turns in zip(episodes(), given, strict=True)]
    config = replace(CONFIG, advantage="turn_grpo")
    batch = to_batch(made)
    shape(batch, made, config, recorder())
    assert batch["reward"].tolist() == [9.0] * 6
    want = turn_grpo(at_turn_ends(given, batch["loss_mask"]), batch["loss_mask"], batch["group"])
    found = advantages_of(batch, config, 0)
    for row, other in zip(found.unbind(), want.unbind(), strict=True):
        assert torch.equal(row, other)
    assert len(set(found.unbind()[3][batch["loss_mask"].unbind()[3]].tolist())) == 2
    with pytest.raises(ValueError, match="no answer has any: give them to Score"):
        shape(batch, episodes(), config, recorder())
    with pytest.raises(ValueError, match="--reward-weights changes the reward, and --advantage turn_grpo reads those"):
        replace(config, shaping=RewardShaping(reward_weights=("form=1",)))
    with pytest.raises(ValueError, match="leaves out groups that --advantage turn_grpo learns from: set it to any"):
        replace(config, filter_groups=FilterGroups(enable=True))

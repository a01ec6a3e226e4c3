"""Losses, advantages and KL estimators against verl's own `core_algos`, values and gradients, in float64 where verl is;
off-policy weights against its `rollout_corr_helper`.

verl adds 1e-8 to counts of tokens, and to a variance where we add 1e-6 to its root.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from verl.trainer.ppo import core_algos as core
from verl.trainer.ppo import rollout_corr_helper as correction
from verl.workers.config import ActorConfig, PolicyLossConfig

from objectives import advantages, kl, losses, off_policy

LENGTHS = (7, 3, 5, 1, 6)
SHAPE = (len(LENGTHS), max(LENGTHS))
GROUPS = torch.tensor([0, 0, 1, 1, 1])
ENDS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
EVERY = torch.ones(sum(LENGTHS), dtype=torch.bool)
MASK = torch.arange(SHAPE[1]) < torch.tensor(LENGTHS)[:, None]
DRAW = torch.Generator().manual_seed(0)
NEW = -2 * torch.rand(SHAPE, generator=DRAW, dtype=torch.float64)
OLD = (NEW + 0.3 * torch.randn(SHAPE, generator=DRAW, dtype=torch.float64)).clamp(max=-0.01)
ADVANTAGES = torch.randn(SHAPE[0], 1, generator=DRAW, dtype=torch.float64).expand(SHAPE).contiguous()
REWARDS = torch.rand(SHAPE[0], generator=DRAW)


def of_verl(name: str, mean: str, new: Tensor, **settings: Any) -> Tensor:
    """verl's loss of the padded tokens."""
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)
    loss: Tensor = core.get_policy_loss_fn(name)(OLD, new, ADVANTAGES, MASK.double(), mean, config)[0]
    return loss


def assert_same(got: Tensor, want: Tensor, again: Tensor, new: Tensor) -> None:
    """Assert that two losses and their gradients by the log-probs of each are equal."""
    torch.testing.assert_close(got, want, rtol=0, atol=2e-7)
    (slope,), (wanted,) = torch.autograd.grad(got, again), torch.autograd.grad(want, new)
    assert wanted.count_nonzero() > 3
    torch.testing.assert_close(slope, wanted, rtol=0, atol=5e-9)


@pytest.mark.parametrize(
    ("ours", "theirs", "how", "given", "theirs_own"),
    [
        ("ppo_clip", "vanilla", "token", (0.2, 0.28, 3.0), {"clip_ratio_c": 3.0}),
        ("cispo", "cispo", "token", (0.2, 0.28), {}),
        ("gspo", "gspo", "sequence", (0.03, 0.04), {}),
        ("gmpo", "geo_mean", "sequence", (0.1, 0.2), {}),
        ("sapo", "sapo", "sequence", (), {"tau_pos": 1.0, "tau_neg": 1.05}),
        ("dppo_tv", "dppo_tv", "token", (0.1, 0.15, 3.0), {"clip_ratio_c": 3.0}),
        ("dppo_kl", "dppo_kl", "token", (0.02, 0.03, 3.0), {"clip_ratio_c": 3.0}),
    ],
)
def test_policy_losses(
    ours: str, theirs: str, how: losses.Aggregation, given: tuple[float, ...], theirs_own: dict[str, float]
) -> None:
    new, again = NEW.clone().requires_grad_(), NEW.clone().requires_grad_()
    bounds = dict(zip(("clip_ratio_low", "clip_ratio_high"), given, strict=False))
    want = of_verl(theirs, "token-mean" if how == "token" else "seq-mean-token-mean", new, **bounds, **theirs_own)
    extra = (EVERY, ENDS) if ours in ("gspo", "gmpo") else ()
    tokens = getattr(losses, ours)(again[MASK], OLD[MASK], ADVANTAGES[MASK], *extra, *given).loss
    assert_same(losses.aggregate(tokens, EVERY, ENDS, how, sum(LENGTHS), len(LENGTHS)), want, again, new)


@pytest.mark.parametrize(("name", "share", "bounds"), [("clip_cov", 1.0, (-0.1, 0.3)), ("kl_cov", 0.2, None)])
def test_losses_by_covariance(name: str, share: float, bounds: tuple[float, float] | None) -> None:
    """Clip-Cov draws among the tokens within bounds: here all of them. verl spares those that PPO's clip cuts already,
    which have no gradient: here its bounds cut none."""
    new, again = NEW.clone().requires_grad_(), NEW.clone().requires_grad_()
    low, high = bounds or (1.0, 5.0)
    own = {"clip_cov_ratio": share, "clip_cov_lb": low, "clip_cov_ub": high, "kl_cov_ratio": share}
    policy_loss = PolicyLossConfig(loss_mode=name, ppo_kl_coef=0.7, **own)
    want = of_verl(name, "token-mean", new, clip_ratio_low=0.99, clip_ratio_high=99.0, policy_loss=policy_loss)
    columns = (ADVANTAGES[MASK], NEW[MASK], EVERY)
    scores, policy, trained = (torch.nested.nested_tensor_from_jagged(x, ENDS.long()) for x in columns)
    chosen = losses.high_covariance(scores, policy, trained, share, bounds).values()
    assert 0 < chosen.sum() < len(chosen)
    own_bounds = (0.99, 99.0) if bounds else (0.7,)
    tokens = getattr(losses, name)(again[MASK], OLD[MASK], ADVANTAGES[MASK], chosen, *own_bounds).loss
    assert_same(losses.aggregate(tokens, EVERY, ENDS, "token", sum(LENGTHS), len(LENGTHS)), want, again, new)


def test_advantages() -> None:
    ends = torch.tensor(LENGTHS)
    given = torch.zeros(SHAPE).scatter_(1, ends[:, None] - 1, REWARDS[:, None]), MASK.float()
    config = type("Config", (dict,), {"gamma": 1.0})()
    for want, got in [
        (core.compute_grpo_outcome_advantage(*given, GROUPS.numpy()), advantages.grpo(REWARDS, GROUPS)),
        (
            core.compute_grpo_outcome_advantage(*given, GROUPS.numpy(), norm_adv_by_std_in_grpo=False),
            advantages.dr_grpo(REWARDS, GROUPS),
        ),
        (core.compute_rloo_outcome_advantage(*given, GROUPS.numpy()), advantages.rloo(REWARDS, GROUPS)),
        (
            core.compute_reinforce_plus_plus_outcome_advantage(*given, config=config),
            advantages.reinforce_plus_plus(REWARDS, ends),
        ),
        (
            core.compute_reinforce_plus_plus_baseline_outcome_advantage(*given, GROUPS.numpy()),
            advantages.reinforce_plus_plus_baseline(REWARDS, GROUPS, ends),
        ),
    ]:
        torch.testing.assert_close(got[:, None] * MASK, want[0], rtol=0, atol=1e-4)


def test_advantages_of_several_rewards() -> None:
    """Of answers of one length: verl's spread is over tokens, ours and TRL's over answers."""
    every, names = torch.ones(SHAPE), ["right", "short"]
    components = torch.rand(len(names), SHAPE[0], generator=torch.Generator().manual_seed(1))
    config = {"gdpo_reward_keys": names, "gdpo_reward_weights": [1.0, 0.5]}
    want, _ = core.compute_gdpo_outcome_advantage(
        torch.zeros(SHAPE),
        every,
        GROUPS.numpy(),
        config=config,
        non_tensor_batch=dict(zip(names, components.numpy(), strict=True)),
        batch={"prompts": every[:, :1], "attention_mask": torch.ones(SHAPE[0], 1 + SHAPE[1], dtype=torch.long)},
    )
    got = advantages.gdpo(components.T, GROUPS, [1.0, 0.5])
    # verl's whitening divides by the deviation of the tokens, n - 1 of them in place of the answers'
    tokens, answers = every.numel() - 1, SHAPE[0] - 1
    spread = (tokens / (answers * SHAPE[1])) ** 0.5
    torch.testing.assert_close(got[:, None] * every * spread, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "level", "bounds"),
    [
        ("truncate", "token", "1.2"),
        ("mask", "token", "0.8_1.2"),
        ("sequence_truncate", "sequence", "1.1"),
        ("sequence_mask", "sequence", "0.6_1.4"),
    ],
)
def test_off_policy_weights(name: off_policy.Correction, level: str, bounds: str) -> None:
    gap = ((NEW - OLD) * MASK).float()
    want, _ = correction.compute_rollout_correction_weights(gap, MASK.float(), level, bounds)
    low, _, cap = bounds.rpartition("_")
    got = off_policy.weights(name, NEW[MASK], OLD[MASK], EVERY, ENDS, float(cap), float(low) if low else None)
    assert len(got.unique()) > 2
    assert (got == (0 if low else float(cap))).any()
    torch.testing.assert_close(got.float(), want[MASK], rtol=0, atol=1e-5)


def test_what_the_mean_of_a_sequence_leaves_out() -> None:
    """verl bounds the log of rollout / trainer, so its bounds are the inverse of ours."""
    kept, _ = correction.compute_rollout_rejection_mask(
        ((NEW - OLD) * MASK).float(), MASK.float(), "seq_mean_k1", f"{1 / 1.1}_{1 / 0.9}"
    )
    got = off_policy.weights("geometric_mask", NEW[MASK], OLD[MASK], EVERY, ENDS, 1.1, 0.9)
    assert 0 < kept[MASK].sum() < len(got)
    assert (got > 0).equal(kept[MASK].bool())


@pytest.mark.parametrize("name", kl.ESTIMATORS)
def test_kl_estimators(name: kl.Estimator) -> None:
    new, again = NEW.clone().requires_grad_(), NEW.clone().requires_grad_()
    want, got = core.kl_penalty(new, OLD, name), kl.estimate(again, OLD, name)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    slopes = [torch.autograd.grad(value.sum(), at)[0] for value, at in ((got, again), (want, new))]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-12)

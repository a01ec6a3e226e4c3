"""The GRPO and SFT objectives: whole-formula oracles, invariance to any split, nothing from groups without a signal."""

import dataclasses
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objectives import GRPO, SFT, Objective, Totals, advantages
from seqpack.batches.batch import make_batch
from seqpack.batches.packed import pack_sequences

VARIANTS = {
    "plain": GRPO(),
    "deepseek": GRPO(aggregation="sequence", kl_coef=0.04),
    "dr": GRPO(aggregation="constant", max_tokens=7),
    "dapo": GRPO(clip_high=0.28, dual_clip=3.0),
    "everything": GRPO(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01, off_policy="truncate", off_policy_cap=1.5),
    "cispo": GRPO(policy_loss="cispo", off_policy="sequence_mask", off_policy_cap=4.0),
}


def sample(seed, length, group):
    rng = torch.Generator().manual_seed(seed)
    prompt = 1 + seed % 2
    mask = torch.arange(length) >= min(prompt, length)
    draw = lambda: -3 * torch.rand(length, generator=rng)  # noqa: E731
    return {
        "input_ids": torch.randint(0, 9, (length,), generator=rng),
        "loss_mask": mask,
        "old_log_probs": draw(),
        "ref_log_probs": draw(),
        "rollout_log_probs": draw(),
        "advantages": torch.randn(1, generator=rng).expand(length).clone(),
        "group": group,
    }


def batch_of(lengths):
    return make_batch([sample(10 * i + length, length, i // 2) for i, length in enumerate(lengths)])


def scored(batch, seed=3):
    """One log-prob and entropy a token as leaves, by row."""
    rng = torch.Generator().manual_seed(seed)
    rows = [(-3 * torch.rand(t.shape[-1], generator=rng)).double() for t in batch["input_ids"].unbind()]
    return [row.requires_grad_() for row in rows], [(-row.detach() * 0.3).requires_grad_() for row in rows]


def run(objective, batch, parts, totals=None):
    """Loss and gradients with the batch split into these parts (lists of rows)."""
    new, entropy = scored(batch)
    loss = torch.zeros((), dtype=torch.float64)
    for part in parts:
        packed = pack_sequences(batch, part)
        share, _ = objective(
            torch.cat([new[i] for i in part]),
            torch.cat([entropy[i] for i in part]) if objective.needs_entropy else None,
            packed,
            totals or Totals.of(batch),
        )
        loss = loss + share
    leaves = new + (entropy if objective.needs_entropy else [])
    return loss.detach(), torch.autograd.grad(loss, leaves)


def oracle(objective, batch):
    """Token by token from the papers, in Python floats."""
    new, entropy = ([row.tolist() for row in rows] for rows in scored(batch))
    columns = {k: [row.tolist() for row in batch[k].unbind()] for k in sample(0, 3, 0) if k != "group"}
    sequences = []
    for i, mask in enumerate(columns["loss_mask"]):
        trained = [t for t in range(1, len(mask)) if mask[t]]
        gap = {t: columns["old_log_probs"][i][t] - columns["rollout_log_probs"][i][t] for t in trained}
        whole = math.exp(sum(gap.values()))
        terms = []
        for t in trained:
            lp, old = new[i][t], columns["old_log_probs"][i][t]
            a, rho = columns["advantages"][i][t], math.exp(lp - old)
            cut = min(max(rho, 1 - objective.clip_low), 1 + objective.clip_high)
            gain = cut * a * lp if objective.policy_loss == "cispo" else min(rho * a, cut * a)
            if objective.dual_clip is not None and a < 0:
                gain = max(gain, objective.dual_clip * a)
            if objective.off_policy == "truncate":
                gain *= min(math.exp(gap[t]), objective.off_policy_cap)
            elif objective.off_policy == "sequence_mask":
                gain *= whole if whole <= objective.off_policy_cap else 0.0
            log_r = columns["ref_log_probs"][i][t] - lp
            penalty = log_r**2 / 2 if objective.kl_estimator == "k2" else math.exp(log_r) - 1 - log_r
            terms.append(-gain + objective.kl_coef * penalty - objective.entropy_coef * entropy[i][t])
        sequences.append(terms)
    used = [terms for terms in sequences if terms]
    if objective.aggregation == "token":
        return sum(map(sum, used)) / sum(map(len, used))
    if objective.aggregation == "sequence":
        return sum(sum(terms) / len(terms) for terms in used) / len(used)
    return sum(map(sum, used)) / (len(used) * objective.max_tokens)


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_formula(name):
    batch = batch_of([5, 3, 1, 8, 2, 4])
    loss, _ = run(VARIANTS[name], batch, [list(range(6))])
    assert float(loss) == pytest.approx(oracle(VARIANTS[name], batch), rel=1e-6)


@st.composite
def split_batches(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
    rows = draw(st.permutations(range(len(lengths))))
    cuts = sorted(draw(st.sets(st.integers(1, max(len(rows) - 1, 1)), max_size=3)) & set(range(1, len(rows))))
    parts = [list(rows[a:b]) for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    return lengths, parts


@given(split_batches(), st.sampled_from(list(VARIANTS)))
def test_any_split_gives_the_same_loss_and_gradient(case, name):
    lengths, parts = case
    batch = batch_of(lengths)
    loss, grads = run(VARIANTS[name], batch, [list(range(len(lengths)))])
    split_loss, split_grads = run(VARIANTS[name], batch, parts)
    torch.testing.assert_close(split_loss, loss, atol=1e-6, rtol=1e-6)
    for got, want in zip(split_grads, grads, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_untrained_tokens_get_no_gradient(name):
    batch = batch_of([5, 3, 1, 8])
    _, grads = run(VARIANTS[name], batch, [[0, 1, 2, 3]])
    for grad, mask in zip(grads, list(batch["loss_mask"].unbind()) * 2, strict=False):
        assert grad[~mask].eq(0).all()
        assert grad[0] == 0


@pytest.mark.parametrize("objective", [*VARIANTS.values(), SFT()])
def test_a_mask_over_a_first_token_trains_nothing_there(objective):
    """The batch's own check refuses such a mask; a packed row made by hand may still have one."""
    packed = pack_sequences(batch_of([4, 3]))
    packed = packed.with_values(loss_mask=torch.ones(7, dtype=torch.bool))
    new = torch.full((7,), -1.0, requires_grad=True)
    loss, _ = objective(new, torch.ones(7), packed, Totals(tokens=5, sequences=2))
    loss.backward()
    assert new.grad[0] == new.grad[4] == 0
    assert new.grad[1] != 0


def test_group_without_signal_gives_exactly_no_gradient():
    batch = batch_of([5, 4, 6, 3])
    advantage = advantages.grpo(torch.tensor([0.3, 0.3, 1.0, 0.0]), batch["group"])
    batch["advantages"] = advantages.per_token(advantage, batch["loss_mask"])
    _, grads = run(GRPO(), batch.exclude("old_log_probs"), [[0, 1], [2, 3]])
    assert all(grad.eq(0).all() for grad in grads[:2])
    assert all(grad[-1] != 0 for grad in grads[2:])


@pytest.mark.parametrize("objective", [*VARIANTS.values(), SFT()])
def test_zero_gradient_rows_add_exactly_nothing(objective):
    batch = batch_of([5, 4, 1, 6, 3])
    advantage = torch.tensor([0.0, 1.0, 1.0, 0.0, -1.0])
    batch["advantages"] = advantages.per_token(advantage, batch["loss_mask"])
    silent = objective.zero_gradient_rows(batch).tolist()
    quiet = objective.required_keys and not getattr(objective, "kl_coef", 0)
    assert silent == ([True, False, True, True, False] if quiet else [False, False, True, False, False])
    rows = [row for row in range(5) if not silent[row]]
    loss, grads = run(objective, batch, [[0, 1, 2, 3, 4]])
    assert all(grads[row].eq(0).all() for row in range(5) if silent[row])
    new, entropy = scored(batch)
    share, _ = objective(
        torch.cat([new[row] for row in rows]),
        torch.cat([entropy[row] for row in rows]),
        pack_sequences(batch, rows),
        Totals.of(batch),
    )
    torch.testing.assert_close(share.detach(), loss)


def test_a_nan_advantage_is_not_silent():
    batch = batch_of([5, 4])
    batch["advantages"] = advantages.per_token(torch.tensor([math.nan, 0.0]), torch.ones_like(batch["loss_mask"]))
    assert GRPO().zero_gradient_rows(batch).tolist() == [False, True]


def test_without_old_log_probs_it_is_on_policy():
    batch = batch_of([5, 4])
    bare = batch.exclude("old_log_probs")
    _, grads = run(GRPO(), bare, [[0, 1]])
    count = Totals.of(batch).tokens
    for grad, mask, advantage in zip(grads, batch["loss_mask"].unbind(), batch["advantages"].unbind(), strict=True):
        torch.testing.assert_close(grad, torch.where(mask, -advantage / count, 0.0).double())


def test_sft_is_cross_entropy():
    batch = batch_of([5, 3, 1, 8])
    new, _ = scored(batch)
    rows = [-row[1:][mask[1:]] for row, mask in zip(new, batch["loss_mask"].unbind(), strict=True)]
    loss, _ = run(SFT(), batch, [[0, 1], [2], [3]])
    torch.testing.assert_close(loss, torch.cat(rows).mean())
    loss, _ = run(SFT(aggregation="sequence"), batch, [[0, 1], [2], [3]])
    torch.testing.assert_close(loss, torch.stack([row.mean() for row in rows if row.numel()]).mean())


def test_totals():
    batch = batch_of([5, 3, 1, 8])
    masks = [row.tolist() for row in batch["loss_mask"].unbind()]
    counts = [sum(row[1:]) for row in masks]
    assert Totals.of(batch) == Totals(tokens=sum(counts), sequences=3, groups=2)


def test_metrics_add_up():
    batch = batch_of([5, 3, 2, 8])
    new, _ = scored(batch)
    objective, totals = GRPO(kl_coef=0.1), Totals.of(batch)
    _, whole = objective(torch.cat(new), None, pack_sequences(batch), totals)
    halves = [
        objective(torch.cat([new[i] for i in part]), None, pack_sequences(batch, part), totals)[1]
        for part in ([0, 2], [1, 3])
    ]
    for key, value in whole.items():
        merged = torch.maximum(*(h[key] for h in halves)) if key.endswith("/max") else sum(h[key] for h in halves)
        torch.testing.assert_close(merged, value, atol=1e-6, rtol=1e-6, msg=key)
        assert not value.requires_grad
    assert whole["ratio"][1] == totals.tokens


@pytest.mark.parametrize("objective", [*VARIANTS.values(), SFT()])
def test_picklable_frozen_and_an_objective(objective):
    assert pickle.loads(pickle.dumps(objective)) == objective
    assert isinstance(objective, Objective)
    with pytest.raises(dataclasses.FrozenInstanceError):
        objective.aggregation = "token"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "constant"}, "max_tokens"),
        ({"max_tokens": 5}, "no effect"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "k1"),
        ({"policy_loss": "cispo", "dual_clip": 3.0}, "no effect"),
        ({"off_policy": "tis"}, "truncate"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        GRPO(**options)


def test_required_keys_follow_the_options():
    assert GRPO().required_keys == ("advantages",)
    assert GRPO(kl_coef=1.0, off_policy="mask").required_keys == ("advantages", "ref_log_probs", "rollout_log_probs")
    assert not GRPO().needs_entropy
    assert GRPO(entropy_coef=0.1).needs_entropy

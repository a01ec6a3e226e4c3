"""The GRPO objective: loss, gradient, metrics from the papers' formulas; any split; nothing from idle rows."""

import dataclasses
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from objectives import GRPO, SFT, Objective, Totals, advantages, off_policy
from seqpack import PackedBatch, make_batch, pack_sequences

VARIANTS = {
    "plain": GRPO(),
    "deepseek": GRPO(aggregation="sequence", kl_coef=0.04),
    "dr": GRPO(aggregation="constant", max_tokens=7),
    "dapo": GRPO(clip_high=0.28, dual_clip=3.0),
    "everything": GRPO(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01, off_policy="truncate", off_policy_cap=1.5),
    "cispo": GRPO(policy_loss="cispo", off_policy="sequence_mask", off_policy_cap=4.0),
    "cispo of two bounds": GRPO(policy_loss="cispo", clip_low=0.4, clip_high=0.5, aggregation="constant", max_tokens=3),
    "masked": GRPO(clip_low=0.1, off_policy="mask", entropy_coef=0.02),
    "sequence weights": GRPO(aggregation="sequence", off_policy="sequence_truncate", kl_coef=0.2),
}
FLOATS = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages")


def sample(seed: int, length: int, group: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)
    prompt = 1 + seed % 2
    mask = torch.arange(length) >= min(prompt, length)

    def draw() -> Tensor:
        return -3 * torch.rand(length, generator=rng)

    return {
        "input_ids": torch.randint(0, 9, (length,), generator=rng),
        "loss_mask": mask,
        "old_log_probs": draw(),
        "ref_log_probs": draw(),
        "rollout_log_probs": draw(),
        "advantages": torch.randn(1, generator=rng).expand(length).clone(),
        "group": group,
    }


def batch_of(lengths: Sequence[int]) -> TensorDict:
    return make_batch([sample(10 * i + length, length, i // 2) for i, length in enumerate(lengths)])


def scored(batch: TensorDict, seed: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    """One log-prob and entropy a token as leaves, by row."""
    rng = torch.Generator().manual_seed(seed)
    rows = [(-3 * torch.rand(t.shape[-1], generator=rng)).double() for t in batch["input_ids"].unbind()]
    return [row.requires_grad_() for row in rows], [(-row.detach() * 0.3).requires_grad_() for row in rows]


def packed_in_float64(batch: TensorDict, rows: Sequence[int] | None) -> PackedBatch:
    packed = pack_sequences(batch, rows)
    return packed.with_values(**{key: packed.values[key].double() for key in FLOATS if key in packed.values})


def run(
    objective: Objective, batch: TensorDict, parts: Sequence[Sequence[int]], totals: Totals | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Loss and gradients, the whole in float64, with the batch split into these parts (lists of rows)."""
    new, entropy = scored(batch)
    loss = torch.zeros((), dtype=torch.float64)
    for part in parts:
        share, _ = objective(
            torch.cat([new[i] for i in part]),
            torch.cat([entropy[i] for i in part]) if objective.needs_entropy else None,
            packed_in_float64(batch, part),
            totals or Totals.of(batch),
        )
        loss = loss + share
    leaves = new + (entropy if objective.needs_entropy else [])
    return loss.detach(), torch.autograd.grad(loss, leaves, materialize_grads=True)


def policy_term(objective: GRPO, lp: float, old: float, a: float) -> tuple[float, float]:
    """-gain of one token and its derivative: PPO's equation 7 and the dual clip, or CISPO."""
    rho = math.exp(lp - old)
    low, high = (0.2, 0.2) if objective.policy_loss == "ppo" else (1.0, 0.28)
    low = low if objective.clip_low is None else objective.clip_low
    high = high if objective.clip_high is None else objective.clip_high
    cut = min(max(rho, 1 - low), 1 + high)
    if objective.policy_loss == "cispo":
        return -cut * a * lp, -cut * a
    if objective.dual_clip is not None and a < 0 and min(rho * a, cut * a) < objective.dual_clip * a:
        return -objective.dual_clip * a, 0.0
    return (-rho * a, -rho * a) if rho * a <= cut * a else (-cut * a, 0.0)


def weight_of(objective: GRPO, gaps: dict[int, float], t: int) -> float:
    """The weight of token t for the log ratios old - rollout of its sequence's trained tokens."""
    cap = 2.0 if objective.off_policy_cap is None else objective.off_policy_cap
    ratio = math.exp(sum(gaps.values()) if objective.correction.startswith("sequence") else gaps[t])
    return {
        "none": 1.0,
        "truncate": min(ratio, cap),
        "mask": ratio if 1 / cap <= ratio <= cap else 0.0,
        "sequence_truncate": min(ratio, cap),
        "sequence_mask": ratio if ratio <= cap else 0.0,
    }[objective.correction]


def penalty_of(objective: GRPO, lp: float, ref: float) -> tuple[float, float]:
    """The KL estimate of one token and its derivative: Schulman's k2 or k3."""
    log_r = ref - lp
    if objective.kl_estimator == "k2":
        return log_r**2 / 2, -log_r
    return math.exp(log_r) - 1 - log_r, 1 - math.exp(log_r)


def oracle(objective: GRPO, batch: TensorDict) -> tuple[float, list[list[float]], list[list[float]]]:
    """(loss, gradient by row, gradient of the entropy by row), token by token in Python floats."""
    new, entropy = ([row.tolist() for row in rows] for rows in scored(batch))
    columns = {key: [row.tolist() for row in batch[key].unbind()] for key in ("loss_mask", *FLOATS)}
    trained = [[t for t in range(1, len(mask)) if mask[t]] for mask in columns["loss_mask"]]
    tokens, sequences = sum(map(len, trained)), sum(map(bool, trained))
    loss, grads = 0.0, ([[0.0] * len(row) for row in new], [[0.0] * len(row) for row in new])
    for i, positions in enumerate(trained):
        old, ref, rollout, advantage = (columns[key][i] for key in FLOATS)
        gaps = {t: old[t] - rollout[t] for t in positions}
        for t in positions:
            term, slope = policy_term(objective, new[i][t], old[t], advantage[t])
            weight = weight_of(objective, gaps, t)
            kl, kl_slope = penalty_of(objective, new[i][t], ref[t])
            share = {
                "token": 1 / tokens,
                "sequence": 1 / (len(positions) * sequences),
                "constant": 1 / (sequences * (objective.max_tokens or 1)),
            }[objective.aggregation]
            loss += share * (weight * term + objective.kl_coef * kl - objective.entropy_coef * entropy[i][t])
            grads[0][i][t] = share * (weight * slope + objective.kl_coef * kl_slope)
            grads[1][i][t] = -share * objective.entropy_coef
    return loss, *grads


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradient_equal_the_formula(name: str) -> None:
    objective, batch = VARIANTS[name], batch_of([5, 3, 1, 8, 2, 4, 40])
    loss, grads = run(objective, batch, [list(range(7))])
    want_loss, *want_grads = oracle(objective, batch)
    assert float(loss) == pytest.approx(want_loss, rel=1e-12)
    wanted = want_grads[0] + (want_grads[1] if objective.needs_entropy else [])
    assert len(wanted) == len(grads)
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), atol=1e-14, rtol=1e-12)


def test_the_variants_reach_every_branch_of_the_formula() -> None:
    """The oracle proves little where no token is clipped, capped or masked."""
    batch = batch_of([5, 3, 1, 8, 2, 4, 40])
    new, entropy = scored(batch)
    for name, keys in {
        "plain": ("clip/low", "clip/high"),
        "dapo": ("clip/low", "clip/high", "clip/dual"),
        "cispo": ("clip/high",),
        "cispo of two bounds": ("clip/low", "clip/high"),
    }.items():
        _, metrics = VARIANTS[name](
            torch.cat(new), torch.cat(entropy), packed_in_float64(batch, None), Totals.of(batch)
        )
        for key in keys:
            assert 0 < float(metrics[key][0]) < float(metrics[key][1]), (name, key)
    old, rollout, mask = (
        torch.cat(list(batch[key].unbind())) for key in ("old_log_probs", "rollout_log_probs", "loss_mask")
    )
    gaps = (old - rollout)[mask]
    assert (gaps > math.log(2)).any()
    assert (gaps < -math.log(2)).any()
    assert (gaps.abs() < math.log(1.5)).any()


@pytest.mark.parametrize("name", VARIANTS)
def test_metrics_equal_their_formulas(name: str) -> None:
    objective, batch = VARIANTS[name], batch_of([5, 3, 1, 8])
    new, entropy = scored(batch)
    _, metrics = objective(torch.cat(new), torch.cat(entropy), packed_in_float64(batch, None), Totals.of(batch))
    columns = [torch.cat(new).tolist(), torch.cat(entropy).tolist()]
    columns += [torch.cat(list(batch[key].unbind())).tolist() for key in FLOATS]
    mask = torch.cat(list(batch["loss_mask"].unbind())).tolist()
    rows = [row for row, trained in zip(zip(*columns, strict=True), mask, strict=True) if trained]
    means = {
        "ratio": sum(math.exp(lp - old) for lp, _, old, *_ in rows),
        "approx_kl": sum(math.exp(lp - old) - 1 - (lp - old) for lp, _, old, *_ in rows),
        "entropy": sum(h for _, h, *_ in rows),
        "ratio/clamped": 0,
        "mismatch/clamped": 0,
        "mismatch/abs": sum(abs(old - rollout) for _, _, old, _, rollout, _ in rows),
        "mismatch/kl": sum(math.exp(old - rollout) - 1 - (old - rollout) for _, _, old, _, rollout, _ in rows),
        "mismatch/weight": sum(math.exp(old - rollout) for _, _, old, _, rollout, _ in rows),
        "mismatch/weight_square": sum(math.exp(2 * (old - rollout)) for _, _, old, _, rollout, _ in rows),
    }
    for edge in off_policy.EDGES:
        means[f"mismatch/above_{edge:g}"] = sum(abs(old - rollout) > edge for _, _, old, _, rollout, _ in rows)
    if objective.kl_coef:
        means["kl"] = sum(penalty_of(objective, lp, ref)[0] for lp, _, _, ref, *_ in rows)
        means["kl/clamped"] = 0
    for key, total in means.items():
        assert metrics[key].tolist() == pytest.approx([total, len(rows)], rel=1e-12), key
    largest = max(abs(old - rollout) for _, _, old, _, rollout, _ in rows)
    assert float(metrics["mismatch/abs/max"]) == pytest.approx(largest)
    bare = dataclasses.replace(objective, kl_coef=0.0, kl_estimator=None, entropy_coef=0.0)
    assert float(metrics["policy_loss"]) == pytest.approx(oracle(bare, batch)[0], rel=1e-12)
    optional = {"clip/dual": objective.dual_clip, "kl": objective.kl_coef}
    optional["off_policy/weight"] = objective.correction != "none"
    extra = {key for key, on in optional.items() if on} | {"policy_loss", "clip/low", "clip/high", "mismatch/abs/max"}
    assert set(metrics) == set(means) | extra


@st.composite
def split_batches(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
    rows = draw(st.permutations(range(len(lengths))))
    cuts = sorted(draw(st.sets(st.integers(1, max(len(rows) - 1, 1)), max_size=3)) & set(range(1, len(rows))))
    parts = [list(rows[a:b]) for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    return lengths, parts


@given(split_batches(), st.sampled_from(list(VARIANTS)))
def test_any_split_gives_the_same_loss_and_gradient(case: tuple[list[int], list[list[int]]], name: str) -> None:
    lengths, parts = case
    batch = batch_of(lengths)
    loss, grads = run(VARIANTS[name], batch, [list(range(len(lengths)))])
    split_loss, split_grads = run(VARIANTS[name], batch, parts)
    torch.testing.assert_close(split_loss, loss, atol=1e-12, rtol=1e-12)
    for got, want in zip(split_grads, grads, strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_untrained_tokens_get_no_gradient_whatever_they_hold(name: str) -> None:
    batch = batch_of([5, 3, 1, 8])
    keep = torch.cat(list(batch["loss_mask"].unbind()))
    packed = packed_in_float64(batch, None)
    dirty = {key: torch.where(keep, packed.values[key], math.inf) for key in FLOATS}
    objective, totals = VARIANTS[name], Totals.of(batch)
    grads = []
    for values in ({}, dirty):
        new = torch.cat(scored(batch)[0]).detach()
        new = torch.where(keep, new, -math.inf if values else new).requires_grad_()
        loss, metrics = objective(new, torch.cat(scored(batch)[1]), packed.with_values(**values), totals)
        assert all(bool(value.isfinite().all()) for value in metrics.values())
        grads.append(torch.autograd.grad(loss, new)[0])
    assert grads[0][~keep].eq(0).all()
    assert grads[0][keep].ne(0).any()
    torch.testing.assert_close(grads[1], grads[0], atol=0, rtol=0)


@pytest.mark.parametrize("objective", [*VARIANTS.values(), SFT()])
def test_a_mask_over_a_first_token_trains_nothing_there(objective: GRPO | SFT) -> None:
    """The batch's own check refuses such a mask; a packed row made by hand may still have one."""
    packed = pack_sequences(batch_of([4, 3]))
    packed = packed.with_values(loss_mask=torch.ones(7, dtype=torch.bool))
    new = torch.full((7,), -1.0, requires_grad=True)
    loss, _ = objective(new, torch.ones(7), packed, Totals(tokens=5, sequences=2))
    loss.backward()
    assert new.grad is not None
    assert new.grad[0] == new.grad[4] == 0
    assert new.grad.ne(0).any()


def cut_in_two(row: dict[str, Any], at: int | None, episode: int) -> list[dict[str, Any]]:
    """The rows of an episode that has two token streams: one token of context before what the second one trains."""
    whole = {"episode": episode, "episode_tokens": int(row["loss_mask"][1:].sum()), "group": row["group"]}
    tokens = {key: value for key, value in row.items() if key != "group"}
    if at is None:
        return [tokens | whole]
    second = {key: value[at:].clone() for key, value in tokens.items()}
    second["loss_mask"][0] = False
    return [{key: value[: at + 1].clone() for key, value in tokens.items()} | whole, second | whole]


@pytest.mark.parametrize(
    "objective", [SFT(aggregation="sequence"), *(VARIANTS[n] for n in ("plain", "deepseek", "dr"))]
)
@given(lengths=st.lists(st.integers(3, 7), min_size=1, max_size=4), data=st.data())
def test_an_episode_of_two_rows_counts_as_one_of_one_row(
    objective: GRPO | SFT, lengths: list[int], data: st.DataObject
) -> None:
    """As a mean over answers is meant: an episode weighs the same in however many token streams it is written."""
    rows = [sample(10 * i + length, length, i // 2) for i, length in enumerate(lengths)]
    cuts = [data.draw(st.one_of(st.none(), st.integers(1, length - 2))) for length in lengths]
    once, cut = (
        [part for i, row in enumerate(rows) for part in cut_in_two(row, at[i], i)] for at in ([None] * len(rows), cuts)
    )
    losses = []
    for given_rows in (once, cut):
        batch = make_batch(given_rows)
        packed = packed_in_float64(batch, range(len(given_rows)))
        # The policy's log-prob of a token is read off the rollout's, so that it goes with the token.
        new = (packed.values["rollout_log_probs"] * 0.9).requires_grad_()
        loss, _ = objective(new, torch.zeros_like(new), packed, Totals.of(batch))
        (gradient,) = torch.autograd.grad(loss, new)
        losses.append((float(loss.detach()), sorted(gradient[gradient != 0].tolist())))
    assert losses[0][0] == pytest.approx(losses[1][0], abs=1e-12)
    assert losses[0][1] == pytest.approx(losses[1][1], abs=1e-12)


def test_group_without_signal_gives_exactly_no_gradient() -> None:
    batch = batch_of([5, 4, 6, 3])
    advantage = advantages.grpo(torch.tensor([0.3, 0.3, 1.0, 0.0]), batch["group"])
    batch["advantages"] = advantages.per_token(advantage, batch["loss_mask"])
    _, grads = run(GRPO(), batch.exclude("old_log_probs"), [[0, 1], [2, 3]])
    assert all(grad.eq(0).all() for grad in grads[:2])
    assert all(grad[-1] != 0 for grad in grads[2:])


@pytest.mark.parametrize("objective", [*VARIANTS.values(), SFT()])
def test_zero_gradient_rows_add_exactly_nothing(objective: GRPO | SFT) -> None:
    batch = batch_of([5, 4, 1, 6, 3])
    advantage = torch.tensor([0.0, 1.0, 1.0, 0.0, -1.0])
    batch["advantages"] = advantages.per_token(advantage, batch["loss_mask"])
    idle = objective.zero_gradient_rows(batch).tolist()
    by_advantage = isinstance(objective, GRPO) and not objective.kl_coef and not objective.entropy_coef
    assert idle == ([True, False, True, True, False] if by_advantage else [False, False, True, False, False])
    rows = [row for row in range(5) if not idle[row]]
    loss, grads = run(objective, batch, [[0, 1, 2, 3, 4]])
    assert all(grads[row].eq(0).all() for row in range(5) if idle[row])
    kept, _ = run(objective, batch, [rows])
    torch.testing.assert_close(kept, loss)


def test_a_nan_advantage_is_not_skipped() -> None:
    batch = batch_of([5, 4])
    batch["advantages"] = advantages.per_token(torch.tensor([math.nan, 0.0]), torch.ones_like(batch["loss_mask"]))
    assert GRPO().zero_gradient_rows(batch).tolist() == [False, True]


def test_without_old_log_probs_it_is_on_policy() -> None:
    batch = batch_of([5, 4])
    bare = batch.exclude("old_log_probs")
    _, grads = run(GRPO(), bare, [[0, 1]])
    count = Totals.of(batch).tokens
    for grad, mask, advantage in zip(grads, batch["loss_mask"].unbind(), batch["advantages"].unbind(), strict=True):
        torch.testing.assert_close(grad, torch.where(mask, -advantage / count, 0.0).double())


def test_entropy_must_be_given_where_it_is_asked_for() -> None:
    batch = batch_of([5])
    with pytest.raises(ValueError, match="needs_entropy"):
        GRPO(entropy_coef=0.1)(scored(batch)[0][0], None, pack_sequences(batch), Totals.of(batch))


def test_metrics_add_up() -> None:
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
def test_picklable_frozen_and_an_objective(objective: GRPO | SFT) -> None:
    assert pickle.loads(pickle.dumps(objective)) == objective
    assert isinstance(objective, Objective)
    with pytest.raises(dataclasses.FrozenInstanceError):
        objective.aggregation = "token"  # type: ignore[misc]

"""Log-ratios: loss and gradient finite however far apart two policies are, counted; else the same bits; NaN seen."""

import ast
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objectives import GRPO, SFT, Totals, kl, losses, off_policy
from objectives.losses import POLICY_LOSSES
from objectives.ratio import HIGHEST, LOWEST, clamped, log_ratio, ratio, ratio_excess, sequence_ratios
from seqpack import PackedBatch, make_batch, pack_sequences

FAR = (-101.0, 101.0, -math.inf, math.inf, -HIGHEST - 0.5, -LOWEST + 0.5)
OBJECTIVES = [
    *(GRPO(policy_loss=name) for name in POLICY_LOSSES),
    GRPO(dual_clip=3.0, kl_coef=0.1, off_policy="truncate"),
    GRPO(kl_coef=0.1, kl_estimator="k2", off_policy="mask", aggregation="sequence"),
    GRPO(policy_loss="cispo", off_policy="sequence_truncate", aggregation="constant", max_tokens=4),
    GRPO(policy_loss="cispo", off_policy="sequence_mask", kl_coef=0.1),
]
KEYS = ("old_log_probs", "ref_log_probs", "rollout_log_probs")


def packed_of(advantage: float, **changed: float) -> tuple[PackedBatch, Totals]:
    """One row of four tokens, three of them trained, the second of which has these log-probs."""
    row = {
        "input_ids": [1, 2, 3, 4],
        "loss_mask": [False, True, True, True],
        "advantages": torch.tensor([0.0, advantage, 1.0, -1.0]),
        "high_covariance": torch.tensor([False, True, False, False]),
        **{key: torch.tensor([0.0, changed.get(key, -1.1), -1.2, -0.9]) for key in KEYS},
    }
    batch = make_batch([row])
    return pack_sequences(batch), Totals.of(batch)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("far", FAR)
def test_a_far_token_gives_a_finite_loss_and_gradient_and_is_counted(objective: GRPO, key: str, far: float) -> None:
    for advantage in (1.0, 0.0, -1.0):
        packed, totals = packed_of(advantage, **{key: far})
        log_probs = torch.tensor([0.0, -1.0, -1.0, -1.0], requires_grad=True)
        loss, metrics = objective(log_probs, None, packed, totals)
        (gradient,) = torch.autograd.grad(loss, log_probs)
        assert bool(loss.isfinite())
        assert bool(gradient.isfinite().all())
        assert (
            bool(gradient[2:].ne(0).any())
            or objective.correction in ("sequence_mask", "sequence_truncate")
            or (objective.policy_loss == "gmpo" and not advantage)  # the sequence's mean advantage is 0
        )
        assert all(bool(value.isfinite().all()) for value in metrics.values())
        start, reference, sampled = (far if name == key else -1.1 for name in KEYS)
        differences = {"ratio": -1.0 - start, "mismatch": start - sampled}
        if objective.kl_coef:
            differences["kl"] = reference + 1.0
        wanted = {f"{name}/clamped": [not LOWEST <= gap <= HIGHEST, 3] for name, gap in differences.items()}
        assert {name: value.tolist() for name, value in metrics.items() if name.endswith("/clamped")} == wanted


@pytest.mark.parametrize("objective", [*OBJECTIVES, SFT(), SFT("sequence"), GRPO(entropy_coef=0.1)])
def test_nan_is_never_hidden(objective: GRPO | SFT) -> None:
    """An engine's guard sees the loss alone: NaN in anything that the loss reads must make it NaN."""
    reads = {"log_probs"}
    if isinstance(objective, GRPO):
        reads |= {"advantages", "old_log_probs"}
        reads |= {"ref_log_probs"} if objective.kl_coef else set()
        reads |= {"rollout_log_probs"} if objective.correction != "none" else set()
        reads |= {"entropy"} if objective.needs_entropy else set()
    for key in reads:
        packed, totals = packed_of(1.0)
        values = {"log_probs": torch.full((4,), -1.0), "entropy": torch.ones(4), **packed.values}
        values[key] = values[key].clone()
        values[key][1] = math.nan
        packed = packed.with_values(**{name: values[name] for name in (*KEYS, "advantages")})
        loss, _ = objective(values["log_probs"], values["entropy"], packed, totals)
        assert bool(loss.isnan()), key


@given(st.lists(st.tuples(st.floats(-60, 0, width=32), st.floats(-60, 0, width=32)), min_size=1, max_size=9))
def test_ordinary_values_keep_their_bits(rows: list[tuple[float, float]]) -> None:
    new, old = (torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True))
    near = (new - old) <= HIGHEST
    assert torch.equal(ratio(new, old)[near], torch.exp(new - old)[near])
    assert torch.equal(ratio_excess(new, old)[near], (torch.expm1(new - old) - (new - old))[near])
    assert torch.equal(kl.k1(old, new)[near], (old - new)[near])
    assert torch.equal(kl.k2(old, new)[near], (0.5 * (new - old).square())[near])
    assert clamped(new, old).tolist() == (~near).tolist()


def test_the_bounds_belong_to_the_range() -> None:
    edges = torch.tensor([HIGHEST, LOWEST, HIGHEST + 1e-4, LOWEST - 1e-4])
    zero = torch.zeros(4)
    assert log_ratio(edges, zero).tolist() == [HIGHEST, LOWEST, HIGHEST, LOWEST]
    assert clamped(edges, zero).tolist() == [False, False, True, True]
    assert bool(ratio(edges, zero).square().isfinite().all())
    wrong = torch.tensor([math.nan, math.inf, -math.inf])
    assert log_ratio(wrong, wrong).isnan().all()


def test_a_penalty_keeps_its_gradient_where_the_reference_finds_a_token_impossible() -> None:
    """The policy is drawn back from tokens that only it would write, however sure it is of them."""
    for estimator in (kl.k2, kl.k3):
        log_probs = torch.tensor([-0.01], requires_grad=True)
        (gradient,) = torch.autograd.grad(estimator(log_probs, torch.tensor([-60.0])).sum(), log_probs)
        assert float(gradient) > 0.9


def test_a_sequence_is_bounded_by_its_sum_and_not_token_by_token() -> None:
    """Far tokens that cancel out leave their product, as the formula says."""
    new = torch.tensor([0.0, -1.0, -51.0, -0.5, 0.0, -2.0])
    old = torch.tensor([9.0, -31.0, -20.0, -0.5, 9.0, -2.5])
    mask, cu_seqlens = torch.tensor([0, 1, 1, 1, 0, 1]).bool(), torch.tensor([0, 4, 6], dtype=torch.int32)
    first, second = math.exp(30.0 - 31.0), math.exp(0.5)
    got = sequence_ratios(new, old, mask, cu_seqlens)
    torch.testing.assert_close(got, torch.tensor([first, second]))
    weights = off_policy.sequence_weights(new, old, mask, cu_seqlens, cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([first] * 4 + [second] * 2))
    root = sequence_ratios(new, old, mask, cu_seqlens, geometric_mean=True)
    torch.testing.assert_close(root, torch.tensor([math.exp(-1 / 3), second]))
    both = torch.tensor([0.0, -math.inf, -1.0, -1.0, 0.0, -1.0])
    opposed = sequence_ratios(both, both.roll(1), mask, cu_seqlens)  # -inf and inf in one sequence cancel out
    torch.testing.assert_close(opposed, torch.tensor([1.0, math.exp(-1.0)]))


def test_a_cap_beyond_the_bounds_is_refused() -> None:
    for cap in (1.1e8, math.inf):
        with pytest.raises(ValueError, match=r"off_policy_cap must be a number from 1 to 1e\+08, got"):
            GRPO(off_policy="mask", off_policy_cap=cap)
        with pytest.raises(ValueError, match="the cap of importance weights must be a number from 1 to"):
            off_policy.truncated_weights(torch.zeros(1), torch.zeros(1), cap)
    far = torch.tensor([0.0, -30.0])
    assert off_policy.masked_weights(far, far.flip(0), cap=1e8).tolist() == [0.0, 0.0]
    assert float(losses.ppo_clip(far, far.flip(0), torch.ones(2)).metrics["ratio"][0]) > 1e8


def test_no_other_module_takes_an_exponential() -> None:
    """exp(new - old) has one place; of a log-probability, which is at most 0, divergences take it too."""
    found = set()
    for path in Path(__file__).parent.glob("*.py"):
        if path.name.endswith("_test.py"):
            continue
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = {call.attr for call in calls if isinstance(call, ast.Attribute)}
        found |= {path.name} if names & {"exp", "exp2", "expm1", "exp_", "expm1_"} else set()
    assert found == {"ratio.py", "divergence.py", "distillation.py"}

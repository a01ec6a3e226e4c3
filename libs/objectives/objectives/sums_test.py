"""Every objective, loss, estimator and metric in every dtype that a model may give, against the same in float64."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from objectives import GRPO, SFT, Totals, advantages, kl, off_policy
from objectives.kl import ESTIMATORS
from objectives.losses import AGGREGATIONS, POLICY_LOSSES, aggregate, cispo, policy_gradient, ppo_clip
from objectives.off_policy import CORRECTIONS
from objectives.sums import pair, sequence_sums, wide
from seqpack import PackedBatch, make_batch, pack_sequences

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOATS = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages")
GRPOS = [
    GRPO(policy_loss=loss, aggregation=how, max_tokens=900 if how == "constant" else None, entropy_coef=0.01)
    for loss in POLICY_LOSSES
    for how in AGGREGATIONS
]
GRPOS += [GRPO(off_policy=name, aggregation="sequence", kl_coef=0.1) for name in CORRECTIONS]
GRPOS += [GRPO(kl_coef=0.1, kl_estimator="k2", dual_clip=3.0)]


def rows_of(lengths: list[int], dtype: torch.dtype, seed: int = 0) -> tuple[PackedBatch, Tensor, Tensor, Totals]:
    """A packed row whose columns, log-probs and entropies have been rounded to a dtype."""
    rng = torch.Generator().manual_seed(seed)
    batch = make_batch(
        [{"input_ids": torch.zeros(n, dtype=torch.int64), "loss_mask": torch.arange(n) > 0} for n in lengths]
    )
    packed, size = pack_sequences(batch), sum(lengths)
    log_probs = -2 * torch.rand(size, generator=rng)
    near = {key: (log_probs + 0.1 * torch.randn(size, generator=rng)).to(dtype) for key in FLOATS[:3]}
    spread = torch.randn(size, generator=rng).to(dtype)
    entropy = torch.rand(size, generator=rng).to(dtype)
    chosen = torch.rand(size, generator=rng) < 0.1
    packed = packed.with_values(**near, advantages=spread, high_covariance=chosen)
    return packed, log_probs.to(dtype), entropy, Totals.of(batch)


def in_float64(packed: PackedBatch) -> PackedBatch:
    return packed.with_values(**{key: packed.values[key].double() for key in FLOATS})


@settings(max_examples=3, deadline=None)
@given(lengths=st.lists(st.integers(300, 900), min_size=1, max_size=3), seed=st.integers(0, 9))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("objective", [*GRPOS, SFT(), SFT("sequence")])
def test_an_objective_in_any_dtype_is_the_one_in_float64(
    objective: GRPO | SFT, dtype: torch.dtype, lengths: list[int], seed: int
) -> None:
    """More tokens than 256, where a count in bfloat16 stalls; a gradient is off by the rounding of its dtype alone."""
    packed, log_probs, entropy, totals = rows_of(lengths, dtype, seed)
    low, high = log_probs.requires_grad_(), log_probs.detach().double().requires_grad_()
    loss, metrics = objective(low, entropy, packed, totals)
    wanted, expected = objective(high, entropy.double(), in_float64(packed), totals)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted, rtol=2e-5, atol=1e-5)
    (gradient,), (exact,) = torch.autograd.grad(loss, low), torch.autograd.grad(wanted, high)
    torch.testing.assert_close(gradient.double(), exact, rtol=2 * torch.finfo(dtype).eps + 1e-5, atol=1e-7)
    assert metrics.keys() == expected.keys()
    for name, value in metrics.items():
        assert value.dtype in (torch.float32, torch.int64), name
        counted = name.startswith(("clip/", "mismatch/above"))  # one token may lie on the other side of an edge
        close = torch.isclose(value.double(), expected[name].double(), rtol=1e-4, atol=1.01 if counted else 1e-4)
        assert bool(close.all()), name


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "policy_gradient": policy_gradient,
    "ppo_clip": lambda new, old: ppo_clip(new, old, old).loss,
    "cispo": lambda new, old: cispo(new, old, old).loss,
    "truncated_weights": off_policy.truncated_weights,
    "masked_weights": lambda new, old: off_policy.masked_weights(new, old, 100.0),
    **ESTIMATORS,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_in_any_dtype_is_the_one_in_float64(name: str, dtype: torch.dtype) -> None:
    packed, new, _, _ = rows_of([400, 300], dtype)
    old = packed.values["old_log_probs"]
    got = FUNCTIONS[name](new, old)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), FUNCTIONS[name](new.double(), old.double()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_measures_of_sequences(dtype: torch.dtype) -> None:
    packed, new, _, _ = rows_of([700, 900], dtype)
    old, mask, bounds = packed.values["old_log_probs"], packed.values["loss_mask"], packed.cu_seqlens
    for correction in CORRECTIONS:
        low = off_policy.weights(correction, new, old, mask, bounds, 1e6)
        high = off_policy.weights(correction, new.double(), old.double(), mask, bounds, 1e6)
        assert low.dtype == torch.float32
        torch.testing.assert_close(low.double(), high, rtol=1e-3, atol=1e-9)
    for name, value in off_policy.mismatch(new, old, mask).items():
        expected = off_policy.mismatch(new.double(), old.double(), mask)[name].double()
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1.01 if "above" in name else 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", AGGREGATIONS)
def test_sums_of_ones_are_exact(dtype: torch.dtype, how: str) -> None:
    ones, mask = torch.ones(5000, dtype=dtype), torch.ones(5000, dtype=torch.bool)
    bounds = torch.tensor([0, 4097, 5000], dtype=torch.int32)
    assert sequence_sums(ones, bounds).tolist() == sequence_sums(mask, bounds).tolist() == [4097, 903]
    assert sequence_sums(mask, bounds).dtype == torch.int64
    assert pair(ones, mask).tolist() == [5000.0, 5000.0]
    assert float(aggregate(ones, mask, bounds, how, 5000, 2, max_tokens=2500)) == 1.0  # type: ignore[arg-type]
    assert wide(ones).dtype == torch.float32
    assert wide(ones.double()).dtype == torch.float64


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64])
def test_advantages_of_rewards_in_any_dtype(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    rewards = (3 * torch.randn(1200, generator=rng)).to(dtype)
    groups = torch.randint(0, 2, (1200,), generator=rng)
    for function in (advantages.grpo, advantages.dr_grpo, advantages.rloo):
        got = function(rewards, groups)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, function(rewards.double(), groups), rtol=0, atol=0)
    got = advantages.reinforce_plus_plus(rewards)
    assert got.dtype == torch.float32
    exact = rewards.double()
    torch.testing.assert_close(got, ((exact - exact.mean()) / (exact.std() + 1e-6)).float(), rtol=1e-6, atol=1e-6)
    batch = make_batch([{"input_ids": torch.zeros(700, dtype=torch.int64), "loss_mask": torch.arange(700) > 0}] * 2)
    spread = advantages.per_token(rewards[:2], batch["loss_mask"])
    assert advantages.per_sequence(spread, batch["loss_mask"]).tolist() == rewards[:2].float().tolist()


def test_every_estimator_is_held_to_float64() -> None:
    assert set(ESTIMATORS) <= set(FUNCTIONS)
    assert kl.ESTIMATORS is ESTIMATORS

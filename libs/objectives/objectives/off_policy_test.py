"""Importance weights by hand, and what they are for: an unbiased gradient from another sampler's tokens."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objectives import off_policy

TRAINER = torch.tensor([0.0, -1.0, -2.0, 0.0, -0.5], dtype=torch.float64)
ROLLOUT = torch.tensor([5.0, -2.0, -1.5, 9.0, -0.5 - math.log(3.0)], dtype=torch.float64)
MASK = torch.tensor([False, True, True, False, True])
CU = torch.tensor([0, 3, 5], dtype=torch.int32)


def test_token_weights() -> None:
    got = off_policy.truncated_weights(TRAINER, ROLLOUT, cap=2.0)[MASK]
    torch.testing.assert_close(got, torch.tensor([2.0, math.exp(-0.5), 2.0], dtype=torch.float64))
    got = off_policy.masked_weights(TRAINER, ROLLOUT, cap=2.5)[MASK]
    torch.testing.assert_close(got, torch.tensor([0.0, math.exp(-0.5), 0.0], dtype=torch.float64))
    assert float(off_policy.masked_weights(torch.tensor([-1.0]), torch.tensor([0.0]), cap=2.0)) == 0.0


def test_sequence_weights_are_the_product_of_trained_tokens() -> None:
    got = off_policy.sequence_weights(TRAINER, ROLLOUT, MASK, CU, cap=10.0)
    first, second = math.exp(1.0 - 0.5), 3.0
    torch.testing.assert_close(got, torch.tensor([first] * 3 + [second] * 2, dtype=torch.float64))
    cut = off_policy.sequence_weights(TRAINER, ROLLOUT, MASK, CU, cap=2.0)
    torch.testing.assert_close(cut, torch.tensor([first] * 3 + [2.0] * 2, dtype=torch.float64))
    gone = off_policy.sequence_weights(TRAINER, ROLLOUT, MASK, CU, cap=2.0, mask=True)
    torch.testing.assert_close(gone, torch.tensor([first] * 3 + [0.0] * 2, dtype=torch.float64))


def test_weights_make_the_gradient_right() -> None:
    """Summed over the sampler's distribution, weighted samples give the trainer's policy gradient."""
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    advantage = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    new = torch.log_softmax(logits, -1)
    weight = off_policy.truncated_weights(new, sampler.log(), cap=100.0)
    (got,) = torch.autograd.grad((sampler * weight * advantage * new).sum(), logits)
    (want,) = torch.autograd.grad((torch.softmax(logits, -1) * advantage).sum(), logits)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


def test_weights_carry_no_gradient() -> None:
    for name in off_policy.CORRECTIONS:
        trainer = TRAINER.clone().requires_grad_()
        assert not off_policy.weights(name, trainer, ROLLOUT, MASK, CU, cap=2.0).requires_grad


def test_weights_are_found_by_name() -> None:
    """Each name with its own function, cap and all; without a cap it is 2."""
    named: dict[off_policy.Correction, Callable[..., torch.Tensor]] = {
        "truncate": lambda **cap: off_policy.truncated_weights(TRAINER, ROLLOUT, **cap),
        "mask": lambda **cap: off_policy.masked_weights(TRAINER, ROLLOUT, **cap),
        "sequence_truncate": lambda **cap: off_policy.sequence_weights(TRAINER, ROLLOUT, MASK, CU, **cap),
        "sequence_mask": lambda **cap: off_policy.sequence_weights(TRAINER, ROLLOUT, MASK, CU, mask=True, **cap),
        "geometric_truncate": lambda **cap: off_policy.sequence_weights(
            TRAINER, ROLLOUT, MASK, CU, geometric_mean=True, **cap
        ),
        "geometric_mask": lambda **cap: off_policy.sequence_weights(
            TRAINER, ROLLOUT, MASK, CU, mask=True, geometric_mean=True, **cap
        ),
    }
    assert set(named) == set(off_policy.CORRECTIONS) - {"none"}
    for name, function in named.items():
        for cap in ({}, {"cap": 1.2}, {"cap": 2.9}, {"cap": 30.0}):
            got = off_policy.weights(name, TRAINER, ROLLOUT, MASK, CU, **cap)
            torch.testing.assert_close(got, function(**cap), atol=0, rtol=0)
        torch.testing.assert_close(function(), function(cap=2.0), atol=0, rtol=0)
    assert off_policy.weights("none", TRAINER, ROLLOUT, MASK, CU, cap=1.1).tolist() == [1.0] * 5


def test_a_ratio_of_exactly_the_cap_stays() -> None:
    same, cu_seqlens = torch.zeros(2, dtype=torch.float64), torch.tensor([0, 2], dtype=torch.int32)
    mask = torch.ones(2, dtype=torch.bool)
    assert off_policy.masked_weights(same, same, cap=1.0).tolist() == [1.0, 1.0]
    assert off_policy.sequence_weights(same, same, mask, cu_seqlens, cap=1.0, mask=True).tolist() == [1.0, 1.0]


def test_an_endless_ratio_stays_finite() -> None:
    far = torch.tensor([500.0, 400.0])
    cu_seqlens, mask = torch.tensor([0, 2], dtype=torch.int32), torch.ones(2, dtype=torch.bool)
    for drop, want in ((False, 3.0), (True, 0.0)):
        got = off_policy.sequence_weights(far, torch.zeros(2), mask, cu_seqlens, cap=3.0, mask=drop)
        assert got.tolist() == [want, want]


def test_mismatch_counts_trained_tokens_alone() -> None:
    got = off_policy.mismatch(TRAINER, ROLLOUT, MASK)
    gaps = [1.0, -0.5, math.log(3.0)]
    assert got["mismatch/abs"].tolist() == pytest.approx([sum(map(abs, gaps)), 3.0])
    assert float(got["mismatch/abs/max"]) == pytest.approx(math.log(3.0))
    assert got["mismatch/kl"].tolist() == pytest.approx([sum(math.exp(g) - 1 - g for g in gaps), 3.0])
    assert got["mismatch/weight"].tolist() == pytest.approx([sum(map(math.exp, gaps)), 3.0])
    assert off_policy.mismatch(TRAINER[:0], ROLLOUT[:0], MASK[:0])["mismatch/abs"].tolist() == [0.0, 0.0]


def means_of(gaps: Sequence[float], parts: int = 1) -> dict[str, float]:
    """What an engine makes of the metrics of `parts` micro-batches: sums over counts, the largest maximum."""
    zero, found = torch.zeros(len(gaps), dtype=torch.float64), []
    for part in range(parts):
        mine = torch.tensor(gaps, dtype=torch.float64)[part::parts]
        found.append(off_policy.mismatch(mine, zero[part::parts], torch.ones(len(mine), dtype=torch.bool)))
    none = torch.zeros(2, dtype=torch.float64)
    pairs = {name: sum((f[name] for f in found), none) for name in found[0] if not name.endswith("/max")}
    means = {name: float(pair[0] / pair[1]) for name, pair in pairs.items()}
    return means | {"mismatch/abs/max": max(float(f["mismatch/abs/max"]) for f in found)}


@given(
    st.lists(st.floats(-20, 20).filter(lambda gap: gap == 0 or abs(gap) > 1e-3), min_size=1, max_size=400),
    st.integers(1, 3),
)
def test_the_meter_is_the_definition_whatever_the_parts(gaps: list[float], parts: int) -> None:
    parts = min(parts, len(gaps))
    meter = off_policy.mismatch_meter(means_of(gaps, parts) | {"loss": 3.0})
    weights = [math.exp(gap) for gap in gaps]
    ess = sum(weights) ** 2 / (len(gaps) * sum(w * w for w in weights))
    assert meter["mismatch/ess"] == pytest.approx(ess, rel=1e-9)
    assert set(meter) == {"loss", *(f"mismatch/{name}" for name in ("abs", "abs/max", "clamped", "kl", "ess", "p99"))}
    sizes = sorted(map(abs, gaps), reverse=True)
    exact = sizes[math.floor(0.01 * len(sizes))]  # the largest that no more than 1 % exceed
    if exact > off_policy.EDGES[-1]:
        assert meter["mismatch/p99"] == sizes[0]
    elif exact > off_policy.EDGES[0]:
        assert exact / 1.42 <= meter["mismatch/p99"] <= 1.42 * exact
    else:
        assert meter["mismatch/p99"] == 0


def test_the_meter_of_equal_policies_and_of_one_apart_in_a_hundred() -> None:
    equal = off_policy.mismatch_meter(means_of([0.0] * 10))
    assert (equal["mismatch/ess"], equal["mismatch/p99"], equal["mismatch/kl"]) == (1.0, 0.0, 0.0)
    assert off_policy.mismatch_meter(means_of([0.0] * 99 + [3.0]))["mismatch/p99"] == 0.0
    assert 1.5 <= off_policy.mismatch_meter(means_of([0.0] * 98 + [3.0] * 2))["mismatch/p99"] <= 4.0
    for size in (0.011, 0.3, 0.9, 2.9):  # between two octaves, off by what half of one explains
        found = off_policy.mismatch_meter(means_of([0.0] * 50 + [size] * 50))["mismatch/p99"]
        assert size / 1.42 <= found <= 1.42 * size


def test_the_quantile_is_interpolated_between_the_edges_around_it() -> None:
    gaps = [1.2] * 5 + [0.9] * 95 + [0.6] * 100 + [0.0] * 800  # above 0.71 lies a share of 0.1, above 1 one of 0.005
    found = off_policy.mismatch_meter(means_of(gaps))["mismatch/p99"]
    assert found == pytest.approx(0.5**0.5 * 2 ** (0.5 * (0.1 - 0.01) / (0.1 - 0.005)), rel=1e-9)


def test_a_difference_on_an_edge_is_not_above_it() -> None:
    gaps, mask = torch.tensor(off_policy.EDGES, dtype=torch.float64), torch.ones(len(off_policy.EDGES)).bool()
    found = off_policy.mismatch(gaps, torch.zeros_like(gaps), mask)
    above = [int(value[0]) for name, value in found.items() if "/above_" in name]
    assert above == list(reversed(range(len(gaps))))


def test_nothing_counted_has_no_effective_size() -> None:
    assert off_policy.mismatch_meter({"loss": 1.0}) == {"loss": 1.0}  # of another objective
    metrics = dict.fromkeys(off_policy.mismatch(TRAINER, ROLLOUT, MASK), 0.0)
    assert off_policy.mismatch_meter(metrics)["mismatch/ess"] == 0.0


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"^the cap of importance weights must be a number from 1 to 1e\+08, got 0.5"):
        off_policy.truncated_weights(TRAINER, ROLLOUT, cap=0.5)
    with pytest.raises(ValueError, match="unknown off-policy correction 'clip': use one of none, truncate"):
        off_policy.weights("clip", TRAINER, ROLLOUT, MASK, CU)  # type: ignore[arg-type]

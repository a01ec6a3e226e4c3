from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpack.planning.balancing import BalancePlan, balance, best_exchange, exchange
from seqpack.planning.exact import least_maximum

COSTS = {
    "any": st.floats(0, 1e6),
    "equal": st.just(3.0),
    "with a giant": st.one_of(st.floats(0, 1), st.just(100.0)),
    "integers": st.integers(0, 9),
    "zero": st.just(0),
    "tiny": st.floats(0, 1e-300),
}


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("equal_size", [False, True])
def test_every_index_once(name: str, equal_size: bool) -> None:
    @given(st.lists(COSTS[name], max_size=60), st.integers(1, 9))
    def check(costs: list[float], parts: int) -> None:
        plan = balance(costs, parts, equal_size)
        assert len(plan.parts) == parts
        assert sorted(i for part in plan.parts for i in part) == list(range(len(costs)))
        assert max(plan.loads) >= plan.lower_bound * (1 - 1e-9)
        counts = [len(part) for part in plan.parts]
        assert not equal_size or max(counts) - min(counts) <= 1
        assert plan == balance(costs, parts, equal_size)
        assert BalancePlan.from_json(plan.to_json()) == plan

    check()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 4), st.booleans())
def test_bound_and_maximum_enclose_the_optimum(costs: list[int], parts: int, equal_size: bool) -> None:
    plan = balance(costs, parts, equal_size)
    optimum = least_maximum(costs, parts, equal_size)
    assert plan.lower_bound <= optimum + 1e-9
    assert optimum <= max(plan.loads)
    if not equal_size:  # Graham's bound for longest first, which exchanges only improve
        assert max(plan.loads) <= (4 / 3 - 1 / (3 * parts)) * optimum + 1e-9


@pytest.mark.parametrize("equal_size", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_lognormal_costs_at_scale(equal_size: bool, seed: int) -> None:
    costs = np.random.default_rng(seed).lognormal(0, 1, 8192)
    plan = balance(costs, 128, equal_size)
    assert max(plan.loads) <= 1.001 * plan.lower_bound


@pytest.mark.parametrize("seed", range(5))
def test_equal_sizes_where_differencing_is_known_to_fail(seed: int) -> None:
    # Largest differencing with equal sizes reaches 1.4 times the mean here.
    costs = np.random.default_rng(seed).lognormal(0, 1, 256)
    plan = balance(costs, 8, equal_size=True)
    assert {len(part) for part in plan.parts} == {32}
    assert plan.max_over_mean <= 1.001 * plan.lower_bound / (costs.sum() / 8)


def test_a_cost_above_the_mean_sets_the_bound() -> None:
    plan = balance([10, 1, 1, 1], 3)
    assert plan.lower_bound == 10
    assert plan.gap == 0
    assert plan.max_over_mean == pytest.approx(30 / 13)
    assert balance([], 2).max_over_mean == balance([0, 0], 2).max_over_mean == 1.0
    assert balance([], 2).gap == 0.0


def test_few_exchanges_are_needed() -> None:
    costs = np.random.default_rng(0).lognormal(0, 1, 8192)
    parts = [list(range(i, 8192, 128)) for i in range(128)]
    before = max(costs[part].sum() for part in parts)
    made = exchange(parts, costs, costs.sum() / 128 * 1.0001, equal_size=True)
    assert before > 1.2 * costs.sum() / 128
    assert max(costs[part].sum() for part in parts) <= 1.001 * costs.sum() / 128
    assert 0 < made <= 8 * 128
    assert {len(part) for part in parts} == {64}


@given(
    st.lists(st.integers(0, 30), max_size=6),
    st.lists(st.integers(0, 30), max_size=6),
    st.integers(0, 40),
    st.booleans(),
)
def test_best_exchange_equals_trying_all(heavy: list[int], light: list[int], difference: int, may_move: bool) -> None:
    pair = best_exchange(np.array(heavy, dtype=float), np.array(light, dtype=float), difference, may_move)
    takes = [*light, 0] if may_move else light
    # Moving x over leaves a difference of |difference - 2 x|.
    left = [abs(difference - 2 * (give - take)) for give in heavy for take in takes]
    if pair is None:
        assert min(left, default=difference) >= difference
    else:
        give, take = pair
        moved = heavy[give] - (0 if take is None else light[take])
        assert abs(difference - 2 * moved) == min(left) < difference
        assert may_move or take is not None


@pytest.mark.parametrize(
    ("costs", "parts", "words"),
    [
        ([1, float("nan")], 2, r"costs\[1\] must be finite and not negative, got nan"),
        ([1, float("inf")], 2, r"costs\[1\] must be finite"),
        ([-1], 2, r"costs\[0\] must be finite and not negative, got -1"),
        ([1e308, 1e308], 2, "costs add up to more than a float holds"),
        ([1, 10**400], 2, r"costs\[1\] is more than a float holds"),
        (["a"], 2, r"costs\[0\] must be a number, got 'a'"),
        ([True], 2, r"costs\[0\] must be a number, got True"),
        ([1], 0, "num_parts must be a positive integer, got 0"),
        (None, 2, "costs must be a sequence of numbers, got NoneType"),
    ],
)
def test_bad_input_is_named(costs: Any, parts: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        balance(costs, parts)

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import seqpack.planning.balancing_capped as capped
from seqpack.planning.balancing_capped import (
    UNITS,
    WIDEST,
    Slots,
    balance_capped,
    cost_units,
    even_out,
    largest_cost_first,
)
from seqpack.planning.bounds import Ints
from seqpack.planning.mixes import MIXES
from seqpack.planning.packing import pack

COSTS = {
    "any": st.floats(0, 1e6),
    "integers": st.integers(0, 9),
    "equal": st.just(2.0),
    "zero": st.just(0.0),
    "with a giant": st.one_of(st.floats(0, 1), st.just(100.0)),
    "tiny": st.floats(0, 1e-300),
}


def check_state(slots: Slots, parts: list[list[int]], cap: int, count: int) -> None:
    """Assert that the tables say what the parts hold."""
    assert sorted(item for part in parts for item in part) == list(range(count))
    sizes, costs = slots.sizes[:-1], slots.costs[:-1]
    assert [int(sizes[part].sum()) for part in parts] == (cap - slots.room).tolist()
    assert [int(costs[part].sum()) for part in parts] == slots.loads.tolist()
    assert (slots.room >= 0).all()
    assert ((slots.table >= 0).sum(1) == slots.counts).all()


@pytest.mark.parametrize("name", COSTS)
def test_rounds_keep_items_cap_and_never_raise_the_costliest_of_a_level(name: str) -> None:
    @given(
        sizes=st.lists(st.one_of(st.integers(1, 40), st.just(1)), min_size=1, max_size=120),
        cap=st.integers(40, 140),
        together=st.integers(1, 4),
        more=st.integers(0, 2),
        data=st.data(),
    )
    def check(sizes: list[int], cap: int, together: int, more: int, data: st.DataObject) -> None:
        costs = data.draw(st.lists(COSTS[name], min_size=len(sizes), max_size=len(sizes)))
        parts = [list(items) for items in pack(sizes, cap).bins]
        parts += [[] for _ in range(-len(parts) % together + more * together)]
        slots = Slots.of(parts, np.array(sizes), cost_units(costs), cap)
        check_state(slots, [slots.items_of(i) for i in range(len(parts))], cap, len(sizes))
        levels = np.argsort(-slots.loads, kind="stable").reshape(-1, together)
        before = slots.loads[levels].max(1)
        even_out(slots, together)
        after = slots.loads[levels].max(1)
        check_state(slots, [slots.items_of(i) for i in range(len(parts))], cap, len(sizes))
        assert (after <= before).all()
        balanced = balance_capped(sizes, costs, len(parts), cap, pack(sizes, cap).bins, together)
        assert sorted(item for part in balanced for item in part) == list(range(len(sizes)))
        assert all(sum(sizes[i] for i in part) <= cap for part in balanced)

    check()


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=WIDEST),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), max_size=WIDEST),
    st.integers(0, 20),
)
def test_one_exchange_equals_trying_all(heavy: list[tuple[int, int]], light: list[tuple[int, int]], room: int) -> None:
    items = heavy + light
    parts = [list(range(len(heavy))), list(range(len(heavy), len(items)))]
    cap = max(sum(size for size, _ in part) for part in (heavy, light)) + room
    sizes, costs = (np.array([item[k] for item in items], dtype=np.int64) for k in (0, 1))
    slots = Slots.of(parts, sizes, costs, cap)
    worst, give, take = (int(x[0]) for x in capped._best_exchanges(slots, np.array([0]), np.array([1])))
    loads, rooms = slots.loads.tolist(), slots.room.tolist()
    possible = {}
    for i, (size, cost) in enumerate(heavy):
        for j, (back, returned) in enumerate([*light, (0, 0)]):
            if size - back <= rooms[1] and back - size <= rooms[0]:
                possible[i, j] = max(loads[0] - cost + returned, loads[1] + cost - returned)
    best = min(possible.values(), default=2 * UNITS)
    assert worst == best if best < loads[0] else worst >= loads[0]
    if worst < loads[0]:
        assert possible[give, take] == best


def test_a_better_start_is_used_when_dealing_by_cost_runs_out_of_room() -> None:
    # Costliest first puts 5 to 4 and leaves no room for 6; the packing 6 + 4 and 5 + 5 does.
    sizes, costs = [4, 5, 5, 6], [8.0, 9.0, 1.0, 0.5]
    assert largest_cost_first(sizes, cost_units(costs).tolist(), 2, 10) is None
    parts = balance_capped(sizes, costs, 2, 10, pack(sizes, 10).bins)
    assert sorted(map(sorted, parts)) == [[0, 3], [1, 2]]


def test_slots_that_run_together_are_evened_out() -> None:
    # No exchange with a slot of the other level is allowed by the cap; within the first level 3 + 1 and 2 + 2 is.
    sizes, costs = [5, 5, 5, 5, 9, 9], [3.0, 2.0, 2.0, 1.0, 0.1, 0.1]
    packed = [[0, 1], [2, 3], [4], [5]]
    parts = balance_capped(sizes, costs, 4, 10, packed, together=2)
    assert sorted(sum(costs[i] for i in part) for part in parts) == [0.1, 0.1, 4.0, 4.0]
    assert [sum(costs[i] for i in part) for part in parts][:2] == [4.0, 4.0]


@pytest.mark.parametrize("mix", MIXES)
def test_the_rounds_do_not_grow_with_the_slots(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    choose = capped._choose

    def counted(slots: Slots, heavy: Ints, partners: Ints) -> tuple[Ints, Ints]:
        rounds.append(len(heavy))
        return choose(slots, heavy, partners)

    monkeypatch.setattr(capped, "_choose", counted)
    for ranks in (64, 256, 1024):
        lengths = MIXES[mix](16 * ranks, 16384).tolist()
        packed = pack(lengths, 32768).bins
        slots = -(-len(packed) // ranks) * ranks
        rounds.clear()
        balance_capped(lengths, [24576.0 * n + n * n for n in lengths], slots, 32768, packed, ranks)
        # Of one pass over s slots a slot is tried some eight times at most, in rounds of sixteen a team.
        assert len(rounds) < 200
        assert sum(rounds) <= 3 * 8 * slots


def test_costs_become_integers_whose_sum_is_exact() -> None:
    assert cost_units([]).tolist() == []
    assert cost_units([0.0, 0.0]).tolist() == [0, 0]
    assert cost_units([1.0, 3.0]).tolist() == [UNITS // 4, 3 * UNITS // 4]
    assert cost_units([1e-320, 1e-320]).tolist() == [UNITS // 2, UNITS // 2]
    assert abs(int(cost_units(np.random.default_rng(0).lognormal(0, 3, 9999).tolist()).sum()) - UNITS) < 9999

"""Task sources: ids that are stable, an order that goes on where it stopped, seeds that no place changes."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.environments.sources import RowSource, TaskRow, TaskSource


def source(size: int = 7, seed: int = 0, held_out: int = 2, name: str = "sums") -> RowSource:
    rows = [TaskRow(f"row-{i}", {"number": i}) for i in range(size)]
    return RowSource(name, rows, [TaskRow(f"held-{i}") for i in range(held_out)], seed)


counts = st.lists(st.integers(0, 12), min_size=1, max_size=12)


@given(counts, st.integers(1, 9), st.integers(0, 3), st.data())
def test_a_restored_source_goes_on_bit_for_bit(steps: list[int], size: int, seed: int, data: st.DataObject) -> None:
    """Whatever the counts, wherever it stops, through JSON and through a pickle; asking twice changes nothing."""
    cut = data.draw(st.integers(0, len(steps)))
    whole = source(size, seed)
    expected = [whole.tasks(step, count) for step, count in enumerate(steps)]
    first = source(size, seed)
    for step in range(cut):
        assert first.tasks(step, steps[step]) == expected[step]
        assert first.tasks(step, steps[step]) == expected[step]
    cursor = json.loads(json.dumps(first.cursor()))
    again = pickle.loads(pickle.dumps(source(size, seed)))
    if data.draw(st.booleans()):
        again.tasks(0, 3)  # a look before the run changes nothing
    again.restore(cursor)
    assert [again.tasks(step, steps[step]) for step in range(cut, len(steps))] == expected[cut:]
    assert again.cursor() == whole.cursor()


@given(counts, st.integers(1, 9))
def test_every_epoch_asks_every_row_once(steps: list[int], size: int) -> None:
    asked = source(size)
    rows = [row for step, count in enumerate(steps) for row in asked.tasks(step, count)]
    for begin in range(0, len(rows) - size + 1, size):
        epoch = rows[begin : begin + size]
        assert {row.id for row in epoch} == {f"row-{i}" for i in range(size)}
        assert {row.visit for row in epoch} == {begin // size}


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, step: int) -> list[str]:
        asked = source(20, seed)
        return [[row.id for row in asked.tasks(n, 20)] for n in range(step + 1)][step]

    assert len({tuple(order(seed, step)) for seed in (0, 1) for step in (0, 1)}) == 4


def test_a_rows_seed_is_its_own_wherever_it_stands() -> None:
    one, two = source(9, seed=0), source(9, seed=5)
    seeds = [{row.id: row.seed(3) for row in asked.tasks(0, 9)} for asked in (one, two)]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 9
    assert {row.id: row.seed(3) for row in one.tasks(1, 9)}.keys() == seeds[0].keys()
    assert not set(seeds[0].values()) & {row.seed(3) for row in one.tasks(1, 9)}  # asked again, answered anew
    assert TaskRow("a").seed(None) is None
    assert TaskRow("a").seed(1) != TaskRow("a").seed(2)


def test_another_sources_cursor_is_refused() -> None:
    cursor = source().cursor()
    for other, what in ((source(8), "rows"), (source(seed=1), "seed"), (source(name="b"), "name")):
        with pytest.raises(ValueError, match=f"its {what} is .*give the data and the seed"):
            other.restore(cursor)


def test_mistakes_are_named() -> None:
    asked: TaskSource = source()
    asked.tasks(3, 2)
    with pytest.raises(ValueError, match="step 2 is over"):
        asked.tasks(2, 2)
    with pytest.raises(ValueError, match="no rows"):
        source(0)
    with pytest.raises(ValueError, match="two rows of the id 'a'"):
        RowSource("x", [TaskRow("a"), TaskRow("b")], [TaskRow("a")])
    assert [row.id for row in asked.held_out()] == ["held-0", "held-1"]

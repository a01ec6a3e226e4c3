"""Plans cover every row once, under the cap, alike on every rank, with and without the rows that are left out."""

from hypothesis import given
from hypothesis import strategies as st

from engines import StepPlan
from engines.config import EngineConfig
from engines.inputs.context_parallel import ContextParallel, ContextParallelPlanner
from engines.parallel.planning import DataParallelPlanner
from engines.tiny import tiny_config

CAP = 16
lengths = st.lists(st.integers(1, CAP), min_size=1, max_size=24)
ranks = st.integers(1, 5)


def planner(size: int, kind: str) -> DataParallelPlanner | ContextParallelPlanner:
    if kind == "off":
        return DataParallelPlanner(CAP, size)
    config = EngineConfig(device="cpu", max_tokens_per_rank=CAP, context_parallel=kind)
    return ContextParallelPlanner(ContextParallel.of(config, tiny_config("attention"), size))


def held(plan: StepPlan) -> dict[int, list[int]]:
    """By row, the plan indices that compute it; each micro-batch's rows are the same on all of its ranks."""
    indices: dict[int, list[int]] = {}
    for index, parts in enumerate(plan.ranks):
        for place, part in enumerate(parts):
            assert index in part.ranks
            assert part.rows or part.ranks == (index,)
            for other in part.ranks:
                assert plan.ranks[other][place] == part
            for row in part.rows:
                indices.setdefault(row, []).append(index)
    return indices


@given(lengths, ranks, st.sampled_from(["off", "dynamic"]))
def test_every_row_once(sizes: list[int], size: int, kind: str) -> None:
    plan = planner(size, kind).plan(sizes)
    owners = held(plan)
    assert sorted(owners) == list(range(len(sizes)))
    for row, indices in owners.items():
        part = next(part for part in plan.ranks[indices[0]] if row in part.rows)
        assert tuple(sorted(indices)) == tuple(sorted(part.ranks))
    assert {len(parts) for parts in plan.ranks} == {plan.num_micro_batches}
    for index, parts in enumerate(plan.ranks):
        for part in parts:
            assert sum(sizes[row] for row in part.rows) <= CAP * len(part.ranks)
        own = {row for part in parts for row in part.rows}
        assert set(plan.rows_of(index)) == (own or {sizes.index(min(sizes))})
    assert 0 < plan.fill <= 1
    assert plan == planner(size, kind).plan(sizes)


@given(lengths, ranks, st.sampled_from(["off", "dynamic"]), st.data())
def test_rows_are_left_out_where_they_are(sizes: list[int], size: int, kind: str, data: st.DataObject) -> None:
    gone = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    plan = planner(size, kind).plan(sizes)
    less = plan.without(gone)
    before, after = held(plan), held(less)
    assert after == {row: indices for row, indices in before.items() if row not in gone}
    assert less.num_micro_batches >= 1
    if len(gone) < len(sizes):
        for place in range(less.num_micro_batches):
            assert any(parts[place].rows for parts in less.ranks)
    assert less.lengths == plan.lengths


@given(st.lists(st.integers(1, CAP), min_size=1, max_size=12), ranks)
def test_renumbered(sizes: list[int], size: int) -> None:
    plan = DataParallelPlanner(CAP, size).plan(sizes)
    rows = [3 * i + 1 for i in range(len(sizes))]
    every = tuple(sizes[(i - 1) // 3] if i in rows else 1 for i in range(3 * len(sizes)))
    other = plan.with_rows(rows, every)
    assert held(other) == {rows[row]: indices for row, indices in held(plan).items()}
    assert other.lengths == every
    assert other.hash == plan.hash

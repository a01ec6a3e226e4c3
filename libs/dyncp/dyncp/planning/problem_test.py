"""What the searches ask of a problem, each number computed again in the plainest way."""

import math
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp.planning.cost import CostModel
from dyncp.planning.planner import make_problem
from dyncp.planning.problem import Bin, CandidatePlan, Problem, laid_out, most_process_groups
from dyncp.planning.sizes import Layout, group_room, local_tokens

COST = replace(CostModel(), delta_layers=0, attention_layers=4, query_heads=8, kv_heads=2)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    world = draw(st.integers(1, 7))
    layout: Layout = draw(st.sampled_from(get_args(Layout)))
    align = draw(st.sampled_from([1, 2, 3]))
    cap = draw(st.integers(2, 12)) * 2 * align + draw(st.integers(0, 1))
    each = 2 * world if layout == "zigzag" else 1
    longest = max(1, group_room(world, cap, layout, align) // each * each)
    lengths = draw(st.lists(st.integers(1, longest), max_size=12))
    return make_problem(lengths, world, cap, COST, layout=layout, align=align)


def padded(problem: Problem, length: int, size: int) -> int:
    each = 2 * size if problem.layout == "zigzag" and size > 1 else 1
    return next(n for n in range(length, length + each) if n % each == 0)


@given(problems())
def test_every_number_is_what_it_says(problem: Problem) -> None:
    lengths = problem.lengths.tolist()
    least = min(base for base, _, _ in problem.table.values())
    assert problem.least_base == least
    assert [lengths[i] for i in problem.order] == sorted(lengths, reverse=True)
    first, place = problem.distinct
    assert [lengths[i] for i in first] == sorted(set(lengths))
    assert [lengths[first[p]] for p in place] == lengths
    assert problem.counts.tolist() == [lengths.count(n) for n in sorted(set(lengths))]
    assert problem.rooms.tolist() == [problem.room(size) for size in problem.sizes]
    for row, (size, (base, token, pair)) in enumerate(problem.table.items()):
        tokens, seconds = problem.columns(size)
        assert tokens == [padded(problem, n, size) for n in lengths]
        assert seconds == pytest.approx([token * n + pair * n * (n + 1) / 2 for n in lengths])
        for column, n in enumerate(sorted(set(lengths))):
            own = token * n + pair * n * (n + 1) / 2
            fits = padded(problem, n, size) <= problem.room(size)
            assert problem.seconds_alone[row, column] == (pytest.approx(base + own) if fits else math.inf)
            share = size * (base - least) * n / problem.room(size) if problem.room(size) else 0.0
            assert problem.intervals[0][row, column] == pytest.approx(problem.seconds_alone[row, column])
            assert problem.intervals[1][row, column] == (pytest.approx(size * own + share) if fits else math.inf)
    holds = [[s for s in problem.sizes if padded(problem, n, s) <= problem.room(s)] for n in lengths]
    assert problem.smallest_sizes.tolist() == [min(sizes) for sizes in holds]
    static = [s for s in problem.sizes if problem.world_size % s == 0 and all(s in sizes for sizes in holds)]
    assert problem.static_sizes == static
    slots = problem.world_size * problem.room(1)
    assert problem.min_steps == max(1, -(-sum(lengths) // slots))


@given(problems(), st.data())
def test_bins_hold_what_they_are_given(problem: Problem, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(problem.sizes))
    samples = [i for i, n in enumerate(problem.lengths.tolist()) if padded(problem, n, size) <= problem.room(size)]
    tokens, seconds = problem.columns(size)
    made = problem.bin_of(size, samples)
    assert (made.size, made.samples) == (size, samples)
    assert made.room == problem.room(size) - sum(tokens[i] for i in samples)
    assert made.seconds == pytest.approx(sum(seconds[i] for i in samples))
    assert problem.bin_seconds(made) == pytest.approx(problem.table[size].base + made.seconds)
    packed = problem.packed(size, samples)
    assert sorted(i for group in packed for i in group) == samples
    loads = [sum(tokens[i] for i in group) for group in packed]
    assert loads == sorted(loads, reverse=True)
    assert all(load <= problem.room(size) for load in loads)
    assert problem.packed(size, samples) is packed  # computed once


def test_idle_ranks_run_a_dummy_alone() -> None:
    problem = make_problem([8, 3], 4, 10, COST)
    base = {size: row.base for size, row in problem.table.items()}
    assert problem.step_seconds([Bin(4, 0, 0.5)]) == base[4] + 0.5
    assert problem.step_seconds([Bin(2, 0, 1.0), Bin(1, 0, 2.0)]) == max(base[2] + 1.0, base[1] + 2.0, base[1])
    assert problem.step_seconds([Bin(1, 0, -base[1] / 2)]) == base[1]  # three ranks wait in dummies
    assert problem.step_seconds([]) == base[1]
    made = problem.candidate([[Bin(4, 0, 0.5)], [Bin(2, 0, 1.0)]], "one")
    assert made.name == "one"
    assert made.total == pytest.approx(sum(made.seconds))
    assert made.seconds == [problem.step_seconds(step) for step in made.steps]


steps = st.lists(st.lists(st.tuples(st.integers(1, 4), st.floats(0, 1)), max_size=3), max_size=4)


@given(steps)
def test_groups_are_laid_out_widest_first(drawn: list[list[tuple[int, float]]]) -> None:
    step = [Bin(size, 0, seconds) for size, seconds in (drawn[0] if drawn else [])]
    placed = laid_out(step)
    order = [(b.size, b.seconds) for _, b in placed]
    assert order == sorted(order, reverse=True)
    assert [start for start, _ in placed] == [sum(size for size, _ in order[:k]) for k in range(len(order))]


@given(steps, st.integers(0, 3))
def test_process_groups_are_counted_for_the_busiest_rank(drawn: list[list[tuple[int, float]]], idle: int) -> None:
    world = max((sum(size for size, _ in step) for step in drawn), default=1) + idle
    made = [[Bin(size, 0, seconds) for size, seconds in step] for step in drawn]
    groups = {tuple(range(start, start + b.size)) for step in made for start, b in laid_out(step)}
    real = [ranks for ranks in groups if 1 < len(ranks) < world]
    most = max((sum(rank in ranks for ranks in real) for rank in range(world)), default=0)
    assert most_process_groups(CandidatePlan(made, [], "x"), world) == most


@given(problems(), st.integers(1, 7), st.data())
def test_the_room_of_a_group_is_all_that_fits_under_the_cap(problem: Problem, size: int, data: st.DataObject) -> None:
    room = group_room(size, problem.cap, problem.layout, problem.align)
    each = 2 * size if problem.layout == "zigzag" and size > 1 else 1
    full = room // each * each
    held = local_tokens([full] if full else [], size, problem.layout, problem.align)
    assert held <= problem.cap
    assert local_tokens([full + each], size, problem.layout, problem.align) > problem.cap or full + each <= room
    multiple = problem.align * (2 if each > 1 and problem.align % 2 else 1)
    lengths = data.draw(st.lists(st.integers(1, 20), max_size=4))
    tokens = local_tokens(lengths, size, problem.layout, problem.align)
    need = sum(-(-n // each) * each for n in lengths)
    assert tokens % multiple == 0
    assert tokens * size >= need
    assert tokens == 0 or (tokens - multiple) * size < need


@pytest.mark.parametrize(
    ("layout", "align", "cap", "size", "lengths", "groups"),
    [
        ("zigzag", 1, 20, 4, (25,) * 5, 3),  # 32 tokens each, padded, into rooms of 80: two a group, not three
        ("contiguous", 1, 50, 2, (36, 34, 30, 50, 22, 21), 2),  # 193 of 200 tokens: longest first needs three groups
        ("contiguous", 16, 47, 2, (40,) * 4, 4),  # rooms of 64, where two caps are 94: one a group, not two
    ],
)
def test_what_is_packed_tightly_counts_padding_and_alignment(
    layout: Layout, align: int, cap: int, size: int, lengths: tuple[int, ...], groups: int
) -> None:
    """Both packers are held to the tokens that ranks hold, not to those of the text."""
    problem = make_problem(lengths, size, cap, COST, layout=layout, align=align)
    packed = problem.packed(size, range(len(lengths)))
    assert all(local_tokens([lengths[i] for i in group], size, layout, align) <= cap for group in packed)
    assert len(packed) == groups

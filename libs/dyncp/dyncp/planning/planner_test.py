"""Every plan deals each sample once, keeps the cap, and is never slower than the best static one under the model."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dyncp.planning.cost import CostModel, Topology
from dyncp.planning.local_search import improved
from dyncp.planning.methods import METHODS
from dyncp.planning.planner import make_problem, plan, predicted_seconds, static_plan
from dyncp.planning.problem import Bin, Problem
from dyncp.planning.search import _balance, dynamic_candidates, static_candidate
from dyncp.planning.simulation import trace_lengths
from dyncp.planning.tight_packing import completed_bins, tight_bins
from dyncp.planning.types import DynamicPlan
from seqpack.planning.exact import min_bins
from seqpack.planning.micro_batches import plan_micro_batches

ATTENTION = replace(CostModel(), delta_layers=0, attention_layers=8, query_heads=12, kv_heads=4)


@st.composite
def questions(draw: st.DrawFn) -> dict[str, Any]:
    world = draw(st.integers(1, 9))
    cap = draw(st.integers(4, 40)) * 2
    layout = draw(st.sampled_from(["contiguous", "zigzag"]))
    method = draw(st.sampled_from(METHODS))
    align = draw(st.sampled_from([1, 1, 2, 3, 8]))
    cap = -(-cap // (2 * align)) * 2 * align
    cost = ATTENTION if layout == "zigzag" or draw(st.booleans()) else CostModel()
    scale = draw(st.sampled_from([1.0, 1e3]))  # tokens are few here: make them weigh something against fixed costs
    cost = replace(
        cost, linear=cost.linear * scale, pair=cost.pair * scale**2, fixed=cost.fixed * draw(st.sampled_from([0, 1]))
    )
    widest = max(s for s in range(1, world + 1) if cost.allowed(s, method))
    lengths = draw(st.lists(st.integers(1, cap), max_size=20)) + draw(
        st.lists(st.integers(1, widest * cap - 2 * widest), max_size=4)
    )
    return {
        "lengths": lengths,
        "world_size": world,
        "max_tokens_per_rank": cap + align - 1,
        "cost": cost,
        "method": method,
        "layout": layout,
        "align": align,
    }


def check(made: DynamicPlan) -> None:
    """The promises, computed from the plan alone in the plainest way."""
    assert sorted(itertools.chain.from_iterable(g.sample_ids for s in made.steps for g in s.groups)) == list(
        range(len(made.lengths))
    )
    for step in made.steps:
        assert [rank for group in step.groups for rank in group.ranks] == list(range(made.world_size))
        for group in step.groups:
            size = len(group.ranks)
            zigzag = made.layout == "zigzag" and size > 1
            each = 2 * size if zigzag else 1
            padded = sum(-(-made.lengths[i] // each) * each for i in group.sample_ids)
            held = -(-padded // size)
            while held % made.align or (zigzag and held % 2):
                held += 1
            assert held == made.tokens_per_rank(group)
            assert held <= made.max_tokens_per_rank


@given(questions())
def test_each_sample_once_under_the_cap_and_never_worse_than_static(question: dict[str, Any]) -> None:
    made = plan(**question)
    check(made)
    assert DynamicPlan.from_json(made.to_json()) == made
    assert plan(**question).hash == made.hash
    ours = predicted_seconds(made, question["cost"])
    assert ours == pytest.approx(made.seconds)
    assert made.lower_bound <= sum(ours) * (1 + 1e-9)
    assert made.gap >= 0
    for size in make_problem(**question).static_sizes:
        static = static_plan(**question, cp_size=size)
        check(static)
        assert {g.cp_size for _, g in static.groups() if g.sample_ids} <= {size}
        assert sum(ours) <= sum(predicted_seconds(static, question["cost"])) * (1 + 1e-9)
        assert made.lower_bound <= sum(predicted_seconds(static, question["cost"])) * (1 + 1e-9)


def test_groups_of_any_size() -> None:
    made = plan([500], 6, 100, method="ring")
    assert made.steps[0].group_of(0).cp_size in (5, 6)
    assert plan([600], 6, 100).steps[0].groups[0].ranks == (0, 1, 2, 3, 4, 5)


def test_sizes_differ_within_a_step() -> None:
    made = plan([30000, 8000, 7000, 8000, 6000], 8, 8192)
    sizes = {group.cp_size for group in made.steps[0].groups}
    assert len(made.steps) == 1
    assert len(sizes) > 1


def test_few_sequences_may_stay_static() -> None:
    assert plan([4000] * 4, 4, 8192).name == "static-1"
    assert plan([8192], 4, 8192).steps[0].groups[0].cp_size == 4


def test_no_samples_make_no_steps_but_a_plan() -> None:
    made = plan([], 4, 16)
    assert made.sample_order() == ()
    assert made.fill == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [5, 401]}, "sample 1 has 401 tokens and fits no group: the widest of 4 ranks holds 400"),
        ({"lengths": [5, 0]}, r"lengths\[1\] must be at least 1, got 0"),
        ({"lengths": [10.7]}, r"lengths\[0\] must be an integer, got 10.7"),
        ({"world_size": 0}, "world_size must be a positive integer, got 0"),
        ({"max_tokens_per_rank": 2.5}, "max_tokens_per_rank must be a positive integer, got 2.5"),
        ({"align": 0}, "align must be a positive integer, got 0"),
        ({"align": 128}, "holds no multiple of align=128: raise it to 128"),
        ({"lengths": [100], "world_size": 1, "align": 64}, "holds 64 at 100 tokens a rank in multiples of 64; raise"),
        ({"layout": "striped"}, "choose one of contiguous, zigzag"),
        ({"method": "broadcast"}, "choose one of ring, ulysses, all_gather"),
        ({"layout": "zigzag", "cost": CostModel()}, "cannot be cut in zigzag"),
        ({"lengths": [600], "world_size": 6, "method": "ulysses"}, "Ulysses cannot deal 8 heads over 6 ranks"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_a_reason(changes: dict[str, Any], message: str) -> None:
    question: dict[str, Any] = {"lengths": [5], "world_size": 4, "max_tokens_per_rank": 100} | changes
    with pytest.raises(ValueError, match=message):
        plan(**question)


def test_a_static_size_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="must divide the 6 ranks and hold the longest sequence, which needs 3"):
        static_plan([300], 6, 100, 2)
    with pytest.raises(ValueError, match="deal the heads evenly"):
        static_plan([300], 6, 100, 6, method="ulysses")


def test_the_planner_keeps_to_the_process_groups_it_may_use() -> None:
    lengths = [100 * n for n in range(1, 9)] * 4
    few = plan(lengths, 8, 256, topology=Topology(max_groups=1))
    for rank in range(8):
        assert len({g.ranks for _, g in few.groups() if rank in g.ranks and 1 < g.cp_size < 8}) <= 1


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.sampled_from([1, 2, 4, 8]), st.integers(60, 130))
def test_no_more_steps_than_seqpack_takes_at_the_same_size(lengths: list[int], cp_size: int, cap: int) -> None:
    steps = len(static_plan(lengths, 8, cap, cp_size).steps)
    assert steps <= plan_micro_batches(lengths, cp_size * cap, 8 // cp_size).num_micro_batches


def test_half_filled_ranks_are_packed() -> None:
    lengths = np.random.default_rng(0).uniform(0.2 * 8192, 0.5 * 8192, 512).astype(int).tolist()
    made = plan(lengths, 64, 8192)
    assert len(made.steps) <= plan_micro_batches(lengths, 8192, 64).num_micro_batches == 3
    assert made.gap < 0.03


def test_many_sequences_come_near_their_bound() -> None:
    """What is proven of plans that no exhaustive search can check."""
    for trace, most in (("lognormal", 0.06), ("bimodal", 0.06), ("uniform", 0.03)):
        made = plan(trace_lengths(trace, 512, 32768), 64, 8192)
        check(made)
        assert made.gap <= most, trace


@given(questions())
def test_local_search_is_never_slower(question: dict[str, Any]) -> None:
    assume(question["lengths"])
    problem = make_problem(**question)
    begin = next(dynamic_candidates(problem, [1.0]), None) or static_candidate(problem, problem.static_sizes[0])
    found = improved(problem, begin)
    assert found.total <= begin.total
    assert sorted(i for step in found.steps for b in step for i in b.samples) == list(range(len(problem.lengths)))
    assert all(b.room >= 0 for step in found.steps for b in step)
    assert all(sum(b.size for b in step) <= problem.world_size for step in found.steps)


def test_planning_work_grows_with_the_samples_not_with_their_product() -> None:
    """Each sequence is looked at by a bounded number of bins: what keeps 512 sequences under ten milliseconds."""
    lengths = [17 + 37 * i % 900 for i in range(512)]
    problem = make_problem(lengths, 64, 1000)
    pops = 0

    class Counting(Bin):
        def __getattribute__(self, name: str) -> object:
            nonlocal pops
            pops += name == "size"
            return object.__getattribute__(self, name)

    assert isinstance(problem, Problem)
    assert _balance(problem, problem.order, [Counting(1, 1000) for _ in range(512)]) is not None
    assert pops < 10 * 512


@given(st.lists(st.integers(1, 60), max_size=8), st.integers(0, 3))
def test_a_group_is_filled_as_no_choice_fills_it_more(tokens: list[int], spare: int) -> None:
    room = max(tokens, default=1) + 20 * spare
    bins = tight_bins(tokens, room)
    assert sorted(i for places in bins for i in places) == list(range(len(tokens)))
    left = set(range(len(tokens)))
    for first, *others in bins:
        assert tokens[first] == max(tokens[i] for i in left)
        left.discard(first)
        sums = [sum(c) for k in range(len(left) + 1) for c in itertools.combinations([tokens[i] for i in left], k)]
        assert sum(tokens[i] for i in others) == max(s for s in sums if tokens[first] + s <= room)
        left -= set(others)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 60), max_size=9), st.integers(0, 40))
def test_groups_are_completed_where_so_few_hold_the_sequences(tokens: list[int], spare: int) -> None:
    """Against every packing: found in the fewest groups there are, and in none fewer."""
    room = max(tokens, default=1) + spare
    fewest = min_bins(tokens, room) if tokens else 0
    assert fewest == 0 or completed_bins(tokens, room, fewest - 1) is None
    bins = completed_bins(tokens, room, fewest)
    assert bins is not None
    assert len(bins) <= fewest
    assert sorted(i for places in bins for i in places) == list(range(len(tokens)))
    assert all(sum(tokens[i] for i in places) <= room for places in bins)


def test_completion_gives_up() -> None:
    """Even numbers leave a token of each odd room empty, one more than there are to spare: no packing, many to try."""
    tokens = [2 * (i % 9 + 1) for i in range(70)]
    while (sum(tokens) + 2) % 8 != 4:
        tokens.append(2)
    room = (sum(tokens) + 2) // 4
    assert room % 2 == 1
    assert completed_bins(tokens, room, 4) is None
    assert completed_bins([5], 4, 3) is None


def test_tokens_beyond_counting_are_counted_in_units_that_fit() -> None:
    tokens = np.random.default_rng(0).integers(1, 10**7, 40).tolist()
    for places in tight_bins(tokens, 10**7):
        assert sum(tokens[i] for i in places) <= 10**7


@pytest.mark.parametrize(
    ("tokens", "room"),
    [
        ([8_192_999, 8_192_999], 16_384_000),  # 8,192.999 units each: rounded down, both fit into 16,384
        ([8_192_184, 8_192_184], 16_384_001),  # 8,184 units of 1,001 each: 16,368, where the room has 16,367.6
        ([32_769, 32_767, 1], 65_536),
    ],
)
def test_a_unit_is_never_room_that_is_not_there(tokens: list[int], room: int) -> None:
    assert sum(tokens) > room
    bins = tight_bins(tokens, room)
    assert len(bins) == 2
    assert all(sum(tokens[i] for i in places) <= room for places in bins)


@given(st.integers(1, 10**9), st.lists(st.tuples(st.integers(2, 4), st.integers(-2000, 2000)), max_size=9))
def test_groups_of_many_tokens_are_not_overfull(room: int, parts: list[tuple[int, int]]) -> None:
    tokens = [min(room, max(1, room // part + more)) for part, more in parts]
    bins = tight_bins(tokens, room)
    assert sorted(i for places in bins for i in places) == list(range(len(tokens)))
    assert all(sum(tokens[i] for i in places) <= room for places in bins)


@given(questions())
def test_local_search_over_one_size_stays_static(question: dict[str, Any]) -> None:
    assume(question["lengths"])
    problem = make_problem(**question)
    for size in problem.static_sizes[-1:]:
        begin = static_candidate(problem, size)
        found = improved(problem, begin, [size])
        assert found.total <= begin.total
        assert found.name == begin.name
        assert {b.size for step in found.steps for b in step} <= {size}


@settings(max_examples=15)
@given(st.integers(65, 300), st.floats(0.05, 1.0), st.floats(0.05, 1.0))
def test_two_sequences_on_many_ranks_get_the_best_two_sizes(world: int, one: float, other: float) -> None:
    lengths = [int(8192 * world * one), int(8192 * world * other)]
    table = make_problem(lengths, world, 8192).table
    pairs = CostModel().pairs(np.array(lengths))

    def seconds(*held: int) -> list[float]:
        tokens, own = sum(lengths[i] for i in held), float(sum(pairs[i] for i in held))
        return [row.seconds(tokens, own) if tokens <= 8192 * size else np.inf for size, row in table.items()]

    first, second, both = (np.minimum.accumulate(seconds(*held)) for held in ((0,), (1,), (0, 1)))
    beside = np.maximum(first[:-1], second[:-1][::-1]).min()
    made = plan(lengths, world, 8192)
    assert sum(made.seconds) == pytest.approx(min(first[-1] + second[-1], beside, both[-1]), rel=1e-9)
    assert made.gap < 1e-9

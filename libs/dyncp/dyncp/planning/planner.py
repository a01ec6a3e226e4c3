"""Plan one optimizer step: candidates under one cost model, the fastest wins, and a proof of how near it is.

1. Check the question; sizes of groups, their coefficients and rooms (`planning/problem.py`); above 64 ranks the
   searches try some sizes (`planning/group_sizes.py`), and the groups of what they find get the best of all sizes
   (`planning/rescale_groups.py`).
2. Dynamic candidates at several target times, static candidates of every size that divides the world
   (`planning/search.py`); a static size whose own bound is above the best so far is left out.
3. The lower bound (`planning/lower_bound.py`). Done where the best candidate is within `CLOSE_ENOUGH` of it.
4. Few sequences: the fastest of all plans, by dynamic programming (`planning/exact.py`), which is its own proof.
   To `SMALL_COUNT`: moves and swaps between groups (`planning/local_search.py`), from the best so far with groups of
   any size and from each static candidate with groups of its own, to sixteen sequences beyond the first plan that no
   change makes faster; to `MOST_STATIC` the fastest static plan itself instead.
5. Lay the groups out over the ranks, and return the plan with `lower_bound` and, from it, `gap`.

Held by tests: every sample once, the cap hard, never slower than any candidate, `lower_bound` never above the optimum
of an exhaustive search, and for seven sequences on eight ranks the optimum itself.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dyncp.planning.cost import Coefficients, CostModel, Topology
from dyncp.planning.exact import MOST_STATIC, exact_candidate, exact_static
from dyncp.planning.local_search import improved
from dyncp.planning.lower_bound import lower_bound
from dyncp.planning.methods import Method
from dyncp.planning.problem import LARGE_COUNT, SMALL_COUNT, CandidatePlan, Problem, laid_out, most_process_groups
from dyncp.planning.rescale_groups import resized
from dyncp.planning.search import dynamic_candidates, static_bound, static_candidate
from dyncp.planning.sizes import Layout, ceil_div, check_layout
from dyncp.planning.types import DynamicPlan, Group, Step
from seqpack.planning.checks import check_lengths, check_positive_int
from seqpack.planning.padding import aligned_length

SLACKS = (1.0, 1.15, 1.5, 2.2, 4.0)
"""Time of a step over that of perfect balance, one dynamic candidate each."""
SLACKS_MEDIUM = (1.0, 1.15, 1.5, 2.2)
SLACKS_LARGE = (1.15,)
CLOSE_ENOUGH = 1e-3
"""A candidate this near the lower bound is taken."""
CLOSE_ENOUGH_LARGE = 0.02
"""The same for more than `LARGE_COUNT` sequences, where another candidate takes a third of a second."""


def plan(
    lengths: Sequence[int],
    world_size: int,
    max_tokens_per_rank: int,
    cost: CostModel | None = None,
    topology: Topology | None = None,
    method: Method = "ring",
    layout: Layout = "contiguous",
    trained_tokens: int = 0,
    align: int = 1,
) -> DynamicPlan:
    """Assign samples to groups of ranks, step by step: each sample once, each rank in one group a step, a hard cap.

    lengths: tokens of each sample. max_tokens_per_rank: tokens a rank may hold, padding included. align: each rank's
    tokens are padded to a multiple of it (see `dyncp.planning.sizes.rank_align`). trained_tokens: the divisor of losses
    (all tokens where 0). A pure function: equal arguments give an equal plan, on every rank.

    Under the cost model no plan takes less than `lower_bound` seconds, whatever the sizes of its groups and the number
    of ranks. Up to seven sequences on eight ranks the plan takes just that. Up to eleven sequences, on any number of
    ranks, no plan with groups of one size is faster (idle ranks' dummies not counted); for more the plan is no slower
    than any static candidate, and `gap` bounds its distance from the optimum.

    ValueError for lengths that are not positive integers, a sequence that fits no group, heads that Ulysses cannot
    divide and a layout that a layer type cannot take.
    """
    problem = make_problem(lengths, world_size, max_tokens_per_rank, cost, topology, method, layout, align)
    limit = (topology or Topology()).max_groups
    best = _fastest_candidate(problem, limit)
    bound = lower_bound(problem, best.total)
    if best.total > bound * (1 + _close_enough(problem)):
        best, bound = _refined(problem, best, bound, limit)
    return _finish(problem, best, method, trained_tokens, bound)


def static_plan(
    lengths: Sequence[int],
    world_size: int,
    max_tokens_per_rank: int,
    cp_size: int,
    cost: CostModel | None = None,
    topology: Topology | None = None,
    method: Method = "ring",
    layout: Layout = "contiguous",
    trained_tokens: int = 0,
    align: int = 1,
) -> DynamicPlan:
    """Return a plan in which every group has cp_size ranks, as a baseline. Its `lower_bound` is that of all plans.

    ValueError where that size cannot hold a sample.
    """
    problem = make_problem(lengths, world_size, max_tokens_per_rank, cost, topology, method, layout, align)
    if cp_size not in problem.static_sizes:
        raise ValueError(
            f"static context parallelism of {cp_size} is not possible: it must divide the {world_size} ranks"
            f"{', deal the heads evenly' if method == 'ulysses' else ''} and hold the longest sequence, which needs "
            f"{problem.smallest_sizes.max(initial=1)}"
        )
    made = static_candidate(problem, cp_size)
    return _finish(problem, made, method, trained_tokens, lower_bound(problem, made.total))


def make_problem(
    lengths: Sequence[int],
    world_size: int,
    max_tokens_per_rank: int,
    cost: CostModel | None = None,
    topology: Topology | None = None,
    method: Method = "ring",
    layout: Layout = "contiguous",
    align: int = 1,
) -> Problem:
    """Check the arguments and compute what every candidate needs. ValueError as in `plan`."""
    cost, topology = cost or CostModel(), topology or Topology()
    check_layout(layout)
    cost.check(method, layout)
    world = check_positive_int(world_size, "world_size")
    cap = check_positive_int(max_tokens_per_rank, "max_tokens_per_rank")
    if check_positive_int(align, "align") > cap:
        raise ValueError(f"max_tokens_per_rank={cap} holds no multiple of align={align}: raise it to {align}")
    table = _table(world, cost, topology, method, layout)
    problem = Problem(check_lengths(lengths), world, cap, layout, align, cost, table)
    does_not_fit = np.flatnonzero(problem.smallest_sizes == 0)
    if len(does_not_fit):
        raise ValueError(_no_group(problem, int(does_not_fit[0]), cost, method))
    return problem


@lru_cache(maxsize=32)
def _table(
    world_size: int, cost: CostModel, topology: Topology, method: Method, layout: Layout
) -> dict[int, Coefficients]:
    sizes = [size for size in range(1, world_size + 1) if cost.allowed(size, method)]
    return {size: cost.coefficients(size, method, layout, topology) for size in sizes}


def _no_group(problem: Problem, sample: int, cost: CostModel, method: Method) -> str:
    length, widest = int(problem.lengths[sample]), max(problem.table)
    padded = f" in multiples of {problem.align}" if problem.align > 1 else ""
    text = (
        f"sample {sample} has {length} tokens and fits no group: the widest of {widest} ranks holds "
        f"{problem.room(widest)} at {problem.cap} tokens a rank{padded}; raise max_tokens_per_rank to "
        f"{aligned_length(ceil_div(length, widest), problem.align)} or shorten it"
    )
    if widest < problem.world_size and any(window is not None for window, _ in cost.windows):
        return text + " (dyncp has no sliding-window attention over several ranks)"
    if widest < problem.world_size and method == "ulysses":
        text += (
            f" (Ulysses cannot deal {cost.query_heads} heads over {problem.world_size} ranks, ring and all_gather can)"
        )
    return text


def _fastest_candidate(problem: Problem, limit: int) -> CandidatePlan:
    """Return the fastest of the dynamic and static candidates; among equals the static one."""
    candidates: list[CandidatePlan] = []
    seconds = float("inf")
    for bound, size in sorted((static_bound(problem, size), size) for size in problem.static_sizes):
        if bound <= seconds:
            candidates.append(static_candidate(problem, size))
            seconds = min(seconds, candidates[-1].total)
    if candidates and seconds <= lower_bound(problem, seconds) * (1 + _close_enough(problem)):
        return min(candidates, key=lambda candidate: candidate.total)
    for made in dynamic_candidates(problem, _targets(problem)):
        candidate = resized(problem, made)
        if candidate.total < seconds and most_process_groups(candidate, problem.world_size) <= limit:
            candidates.append(candidate)
            seconds = candidate.total
    if not candidates:
        raise ValueError("no plan: Topology.max_groups is too small for dynamic groups, and no static size is possible")
    return min(candidates, key=lambda candidate: (candidate.total, candidate.name == "dynamic"))


def _close_enough(problem: Problem) -> float:
    """Return the gap at which a search ends: only rounding where the optimum can be found."""
    count = len(problem.lengths)
    return 1e-9 if count <= MOST_STATIC else CLOSE_ENOUGH if count <= LARGE_COUNT else CLOSE_ENOUGH_LARGE


def _targets(problem: Problem) -> list[float]:
    """Return target times of a step, ascending from perfect balance."""
    tokens = int(problem.lengths.sum())
    if not tokens:
        return []
    work = problem.table[1].token * tokens + problem.table[1].pair * float(problem.pairs.sum())
    even = problem.table[1].base + work / problem.world_size / problem.min_steps
    count = len(problem.lengths)
    slacks = SLACKS if count <= SMALL_COUNT else SLACKS_MEDIUM if count <= LARGE_COUNT else SLACKS_LARGE
    return [even * slack for slack in slacks]


def _refined(problem: Problem, best: CandidatePlan, bound: float, limit: int) -> tuple[CandidatePlan, float]:
    """Return (a plan no slower than `best`, the higher bound), by the searches for few sequences."""

    def faster(other: CandidatePlan | None) -> CandidatePlan:
        """Return the faster of `other` and the best so far, if ranks may be in so many groups."""
        if other is None or other.total >= best.total or most_process_groups(other, problem.world_size) > limit:
            return best
        return other

    if len(problem.lengths) <= SMALL_COUNT:
        best = faster(resized(problem, improved(problem, best)))
        for size in problem.static_sizes:
            if static_bound(problem, size) < best.total:
                exactly = exact_static(problem, size)
                best = faster(exactly or improved(problem, static_candidate(problem, size), [size]))
    exact = exact_candidate(problem, best.total, problem.allowed.tolist())
    if exact is not None:
        return faster(exact[0]), min(best.total, exact[1])
    if len(problem.sizes) < len(problem.allowed):  # not all sizes, so no proof
        fewer = exact_candidate(problem, best.total, problem.sizes)
        best = faster(resized(problem, fewer[0]) if fewer else None)
    return best, min(bound, best.total)


def _finish(
    problem: Problem, candidate: CandidatePlan, method: Method, trained_tokens: int, bound: float
) -> DynamicPlan:
    steps = []
    for bins in candidate.steps:
        groups = [Group(tuple(range(s, s + b.size)), tuple(sorted(b.samples))) for s, b in laid_out(bins)]
        used = sum(b.size for b in bins)
        groups += [Group((rank,), ()) for rank in range(used, problem.world_size)]
        steps.append(Step(tuple(groups)))
    return DynamicPlan(
        lengths=tuple(problem.lengths.tolist()),
        world_size=problem.world_size,
        max_tokens_per_rank=problem.cap,
        steps=tuple(steps),
        layout=problem.layout,
        method=method,
        trained_tokens=trained_tokens,
        name=candidate.name,
        seconds=tuple(candidate.seconds),
        align=problem.align,
        lower_bound=bound,
    )


def predicted_seconds(
    plan: DynamicPlan, cost: CostModel | None = None, topology: Topology | None = None
) -> list[float]:
    """Return the time of each step of any plan under a cost model, computed from the plan alone."""
    cost, topology = cost or CostModel(), topology or Topology()
    pairs = cost.pairs(np.array(plan.lengths, dtype=np.int64)).tolist()
    seconds = []
    for step in plan.steps:
        slowest = 0.0
        for group in step.groups:
            factors = cost.coefficients(group.cp_size, plan.method, plan.layout, topology)
            tokens = sum(plan.lengths[i] for i in group.sample_ids)
            slowest = max(slowest, factors.seconds(tokens, sum(pairs[i] for i in group.sample_ids)))
        seconds.append(slowest)
    return seconds

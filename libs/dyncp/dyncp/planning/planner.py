"""Plan one optimizer step: a portfolio of static and dynamic candidates under one cost model; the fastest wins."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dyncp.ops.methods import Method
from dyncp.planning.cost import Coefficients, CostModel, Topology
from dyncp.planning.search import Bin, Problem, Shape, dynamic_shapes, static_shape
from dyncp.planning.sizes import Layout, ceil_div, check_layout
from dyncp.planning.types import DynamicPlan, Group, Step

SLACKS = (1.0, 1.15, 1.5, 2.2, 4.0)


def plan(
    lengths: Sequence[int],
    world_size: int,
    max_tokens_per_rank: int,
    cost: CostModel | None = None,
    topology: Topology | None = None,
    method: Method = "ring",
    layout: Layout = "contiguous",
    trained_tokens: int = 0,
) -> DynamicPlan:
    """Deal samples to groups of ranks, step by step: every sample once, every rank in one group a step, the cap hard.

    lengths: tokens of each sample. max_tokens_per_rank: tokens a rank may hold, padding included. The candidates are
    every static context-parallel size that divides the world and dynamic plans at several target times; under the cost
    model the answer is never slower than the best static one. trained_tokens: what losses are divided by (all tokens
    where 0). A pure function: equal arguments give an equal plan, on every rank. ValueError for a sequence that fits no
    group, for heads that Ulysses cannot deal and for a layout that a layer type cannot take.
    """
    problem = make_problem(lengths, world_size, max_tokens_per_rank, cost, topology, method, layout)
    topology = topology or Topology()
    candidates: list[tuple[float, str, Shape]] = []
    seconds = float("inf")
    for shape in dynamic_shapes(problem, _targets(problem)):
        if shape.total < seconds and _communicators(problem, shape) <= topology.max_groups:
            candidates.append((shape.total, "dynamic", shape))
            seconds = shape.total
    for size in static_sizes(problem):
        if _static_bound(problem, size) <= seconds:
            shape = static_shape(problem, size)
            candidates.append((shape.total, f"static-{size}", shape))
            seconds = min(seconds, shape.total)
    if not candidates:
        raise ValueError("no plan: Topology.max_groups is too small for dynamic groups, and no static size is possible")
    _, name, shape = min(candidates, key=lambda candidate: (candidate[0], candidate[1] == "dynamic"))
    return _finish(problem, shape, name, method, trained_tokens)


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
) -> DynamicPlan:
    """The best plan in which every group has cp_size ranks; the baseline. ValueError where that size cannot hold a
    sample.
    """
    problem = make_problem(lengths, world_size, max_tokens_per_rank, cost, topology, method, layout)
    if cp_size not in static_sizes(problem):
        raise ValueError(
            f"static context parallelism of {cp_size} is not possible: it must divide the {world_size} ranks"
            f"{', deal the heads evenly' if method == 'ulysses' else ''} and hold the longest sequence, which needs "
            f"{problem.smallest_sizes.max(initial=1)}"
        )
    return _finish(problem, static_shape(problem, cp_size), f"static-{cp_size}", method, trained_tokens)


def make_problem(
    lengths: Sequence[int],
    world_size: int,
    max_tokens_per_rank: int,
    cost: CostModel | None = None,
    topology: Topology | None = None,
    method: Method = "ring",
    layout: Layout = "contiguous",
) -> Problem:
    """Check the question and compute what every candidate needs. ValueError as in `plan`."""
    cost, topology = cost or CostModel(), topology or Topology()
    check_layout(layout)
    cost.check(method, layout)
    if world_size < 1 or max_tokens_per_rank < 1:
        raise ValueError(
            f"world_size and max_tokens_per_rank must be positive, got {world_size} and {max_tokens_per_rank}"
        )
    short = [i for i, length in enumerate(lengths) if length < 1]
    if short:
        raise ValueError(f"sample {short[0]} has {lengths[short[0]]} tokens: drop empty samples before planning")
    table = _table(world_size, cost, topology, method, layout)
    problem = Problem(lengths, world_size, max_tokens_per_rank, layout, table)
    homeless = np.flatnonzero(problem.smallest_sizes == 0)
    if len(homeless):
        raise ValueError(_no_group(problem, int(homeless[0]), cost, method))
    return problem


@lru_cache(maxsize=32)
def _table(
    world_size: int, cost: CostModel, topology: Topology, method: Method, layout: Layout
) -> dict[int, Coefficients]:
    sizes = [size for size in _sizes_to_try(world_size) if cost.allowed(size, method)]
    return {size: cost.coefficients(size, method, layout, topology) for size in sizes}


def _no_group(problem: Problem, sample: int, cost: CostModel, method: Method) -> str:
    length, widest = int(problem.lengths[sample]), problem.sizes[-1]
    text = (
        f"sample {sample} has {length} tokens and fits no group: the widest of {widest} ranks holds "
        f"{problem.room(widest)} at {problem.cap} tokens a rank; raise max_tokens_per_rank to "
        f"{ceil_div(length, widest)} or shorten it"
    )
    if widest < problem.world_size and method == "ulysses":
        text += (
            f" (Ulysses cannot deal {cost.query_heads} heads over {problem.world_size} ranks, ring and all_gather can)"
        )
    return text


def _sizes_to_try(world_size: int) -> list[int]:
    """All sizes up to 64, then eight between powers of two, and all divisors of the world."""
    sizes = set(range(1, min(world_size, 64) + 1)) | {d for d in range(1, world_size + 1) if world_size % d == 0}
    power = 64
    while power < world_size:
        sizes |= {size for size in range(power, 2 * power, power // 8) if size <= world_size}
        power *= 2
    return sorted(sizes)


def static_sizes(problem: Problem) -> list[int]:
    """Sizes that divide the world and hold every sequence."""
    holds = np.isfinite(problem.seconds_by_size).all(axis=1)
    return [size for size, good in zip(problem.sizes, holds, strict=True) if good and problem.world_size % size == 0]


def _targets(problem: Problem) -> list[float]:
    """Times a step may take, from perfect balance upwards."""
    tokens = int(problem.lengths.sum())
    if not tokens:
        return []
    work = problem.table[1].token * tokens + problem.table[1].pair * float(problem.pairs.sum())
    steps = ceil_div(tokens, problem.world_size * problem.cap)
    even = problem.table[1].base + work / problem.world_size / steps
    return [even * slack for slack in SLACKS]


def _static_bound(problem: Problem, size: int) -> float:
    """No static plan of this size is faster: perfect balance in as few steps as the tokens need."""
    tokens, seconds = problem.columns_array(size)
    groups = problem.world_size // size
    steps = max(1, ceil_div(int(tokens.sum()), groups * problem.room(size)))
    return steps * problem.table[size].base + float(seconds.sum()) / groups


def _communicators(problem: Problem, shape: Shape) -> int:
    """The most distinct process groups that any rank would be in."""
    counts: Counter[int] = Counter()
    spans = {(start, b.size) for step in shape.steps for start, b in _laid_out(step) if 1 < b.size < problem.world_size}
    for start, size in spans:
        counts.update(range(start, start + size))
    return max(counts.values(), default=0)


def _laid_out(step: list[Bin]) -> list[tuple[int, Bin]]:
    """(first rank, bin), widest first: equal sizes start at equal places in every step, so few process groups are
    needed.
    """
    start, placed = 0, []
    for b in sorted(step, key=lambda b: (-b.size, -b.seconds)):
        placed.append((start, b))
        start += b.size
    return placed


def _finish(problem: Problem, shape: Shape, name: str, method: Method, trained_tokens: int) -> DynamicPlan:
    steps = []
    for bins in shape.steps:
        groups = [Group(tuple(range(s, s + b.size)), tuple(sorted(b.samples))) for s, b in _laid_out(bins)]
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
        name=name,
        seconds=tuple(shape.seconds),
    )


def predicted_seconds(
    plan: DynamicPlan, cost: CostModel | None = None, topology: Topology | None = None
) -> list[float]:
    """The time of each step of any plan under a cost model, computed from the plan alone."""
    cost, topology = cost or CostModel(), topology or Topology()
    seconds = []
    for step in plan.steps:
        slowest = 0.0
        for group in step.groups:
            factors = cost.coefficients(group.cp_size, plan.method, plan.layout, topology)
            lengths = [plan.lengths[i] for i in group.sample_ids]
            slowest = max(slowest, factors.seconds(sum(lengths), sum(n * n / 2 for n in lengths)))
        seconds.append(slowest)
    return seconds

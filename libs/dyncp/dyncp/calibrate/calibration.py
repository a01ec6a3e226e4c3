"""Measure instead of guess: fit the cost model's numbers to timed groups of ranks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dyncp.planning.cost import Coefficients, CostModel
from dyncp.planning.methods import Method
from dyncp.planning.sizes import Layout
from dyncp.planning.types import DynamicPlan, Group, Step


class Timing(NamedTuple):
    """The seconds that a group took for sequences of these lengths."""

    lengths: tuple[int, ...]
    seconds: float


def fit(timings: Sequence[Timing]) -> Coefficients:
    """Return the non-negative seconds of base, token and pair that fit the timings best in relative error."""
    if len(timings) < 3:
        raise ValueError(f"three numbers need at least three timings, got {len(timings)}")
    seconds = np.array([t.seconds for t in timings])
    columns = np.array([[1.0, sum(t.lengths), sum(n * (n + 1) / 2 for n in t.lengths)] for t in timings])
    scale = columns.max(axis=0)
    rows = columns / scale / seconds[:, None]
    terms = [0, 1, 2]
    while True:
        solution = np.linalg.lstsq(rows[:, terms], np.ones(len(timings)), rcond=None)[0]
        if (solution >= 0).all() or len(terms) == 1:
            break
        terms.pop(int(solution.argmin()))
    coefficients = np.zeros(3)
    coefficients[terms] = np.maximum(solution, 0.0) / scale[terms]
    return Coefficients(*coefficients.tolist())


def workloads(cp_size: int, cap: int) -> list[tuple[int, ...]]:
    """Return lengths for one group: one sequence of the group's room, short ones, and long-tailed mixes."""
    full = cp_size * cap
    short = max(1, cap // 16)
    return [
        (full,),
        (full // 2,),
        (full // 4,) * 4,
        (short,) * (full // short),
        (short,) * (full // short // 2 or 1),
        *(_long_tailed(full, cap, seed) for seed in range(3)),
    ]


def _long_tailed(full: int, cap: int, seed: int) -> tuple[int, ...]:
    """Return lognormal lengths around a quarter of the cap that fill nine tenths of the group."""
    drawn = np.random.default_rng(seed).lognormal(np.log(max(cap / 4, 1.0)), 1.0, 64)
    lengths = np.clip(drawn, 1, max(full // 2, 1)).astype(int)
    fitting = lengths[: max(1, int((lengths.cumsum() <= 0.9 * full).sum()))]
    return tuple(fitting.tolist())


def uniform_plan(
    lengths: Sequence[int],
    world_size: int,
    cap: int,
    cp_size: int,
    method: Method,
    layout: Layout,
    steps: int = 1,
    align: int = 1,
) -> DynamicPlan:
    """Return a plan of equal steps: each group of cp_size ranks has sequences of these lengths, other ranks idle."""
    count, each = world_size // cp_size, len(lengths)
    made = []
    for step in range(steps):
        firsts = [(step * count + g) * each for g in range(count)]
        groups = [
            Group(tuple(range(g * cp_size, (g + 1) * cp_size)), tuple(range(first, first + each)))
            for g, first in enumerate(firsts)
        ]
        groups += [Group((rank,), ()) for rank in range(count * cp_size, world_size)]
        made.append(Step(tuple(groups)))
    return DynamicPlan(
        tuple(lengths) * count * steps, world_size, cap, tuple(made), layout, method, name="uniform", align=align
    )


def calibrate_groups(
    run: Callable[[DynamicPlan], float],
    cost: CostModel,
    world_size: int,
    cap: int,
    sizes: Sequence[int],
    methods: Sequence[Method],
    layout: Layout = "contiguous",
    steps: int = 3,
    align: int = 1,
) -> CostModel:
    """Return the cost model with measured coefficients of each size and method. run(plan): its seconds (collective).

    align: as in `dyncp.plan`; the cap must be a multiple of it. A plan of several equal steps is timed, so that the
    costs of once an optimizer step weigh as little as in training.
    """
    rows = []
    for size in sizes:
        for method in methods if size > 1 else methods[:1]:
            if not cost.allowed(size, method):
                continue
            timings = [
                Timing(lengths, run(uniform_plan(lengths, world_size, cap, size, method, layout, steps, align)) / steps)
                for lengths in workloads(size, cap)
            ]
            rows.append((method, size, *fit(timings)))
    return replace(cost, measured=tuple(rows))

"""The best sizes for the groups of a plan, out of all sizes there are: searches on many ranks try only some.

What a group holds stays. In a step, the time of a group falls with every size that is worth its ranks; the least time
of the step is the least for which the fewest ranks of every group within it add up to no more than the world has. Found
among the groups' own times by bisection. Never slower than before.
"""

import numpy as np
from numpy.typing import NDArray

from dyncp.planning.problem import Bin, CandidatePlan, Problem, ceil_div_array
from dyncp.planning.sizes import sequence_align

MOST_ENTRIES = 500_000
"""Sizes times sequences of one step; larger steps stay as they are."""


def resized(problem: Problem, candidate: CandidatePlan) -> CandidatePlan:
    """Return the candidate with the best size of each group; unchanged where all sizes were tried already."""
    if len(problem.allowed) == len(problem.sizes):
        return candidate
    better = problem.candidate([_resized_step(problem, step) for step in candidate.steps], candidate.name)
    if better.total >= candidate.total * (1 - 1e-12):
        return candidate
    return better._replace(name="dynamic")


def _resized_step(problem: Problem, step: list[Bin]) -> list[Bin]:
    if not step or sum(len(b.samples) for b in step) * len(problem.allowed) > MOST_ENTRIES:
        return step
    seconds = [np.minimum.accumulate(_group_seconds(problem, b.samples)) for b in step]
    # What every group can reach at its widest is the least; what the step takes now is the most.
    most, least = max(map(problem.bin_seconds, step)) * (1 + 1e-12), max(float(column[-1]) for column in seconds)
    times = np.unique(np.concatenate([column[(column >= least) & (column <= most)] for column in seconds]))
    low, high = 0, len(times)
    while low < high:
        middle = (low + high) // 2
        fits = _ranks(problem, seconds, times[middle]).sum() <= problem.world_size
        low, high = (low, middle) if fits else (middle + 1, high)
    if low == len(times):
        return step
    sizes = _ranks(problem, seconds, times[low]).tolist()
    return [problem.bin_of(size, b.samples) for size, b in zip(sizes, step, strict=True)]


def _ranks(problem: Problem, seconds: list[NDArray[np.float64]], time: float) -> NDArray[np.int64]:
    """Return i64[groups]: the fewest ranks of each group within the time, in which each group can end."""
    places = [len(column) - int(np.searchsorted(column[::-1], time, side="right")) for column in seconds]
    return problem.allowed[places]


def _group_seconds(problem: Problem, samples: list[int]) -> NDArray[np.float64]:
    """Return f64[allowed]: seconds of one group of each size with these samples, infinite without room."""
    base, token, pair = problem.allowed_base_token_pair
    lengths, pairs = problem.lengths[samples], float(problem.pairs[samples].sum())
    tokens = np.full(len(problem.allowed), int(lengths.sum()))
    if problem.layout == "zigzag":
        each = np.array([sequence_align(size, problem.layout) for size in problem.allowed.tolist()])[:, None]
        tokens = (ceil_div_array(lengths, each) * each).sum(axis=1)
    seconds = base + token * float(lengths.sum()) + pair * pairs
    return np.where(tokens <= problem.rooms_of(problem.allowed), seconds, np.inf)

"""What no plan of these lengths can beat under the cost model: the proof beside the search.

With W ranks, K steps of times t_1 .. t_K, and groups of any size that the method allows, 1 to W, whether or not the
searches try it:

1. Steps. All tokens fit into K x W ranks under the cap, so K is at least `min_steps`; no step takes less than the
   least base b of any size.
2. Sizes. Let a plan of `at_most` seconds be known. In a faster one no step takes more than at_most - (K - 1) b, so a
   sequence is in no group of a size in which it alone would take longer. Other sizes are ruled out for it.
3. Work. A group of s ranks in a step of time t has s x t rank-seconds: s x b, what its size costs above b, shared among
   its sequences by their tokens (which cannot exceed its room), and s times each sequence's own seconds: together
   the second part of `Problem.intervals`. Each sequence takes at least the least of these over its sizes, and
   W x (t_1 + .. + t_K - K b) is at least their sum.
4. Length. The step of a sequence takes at least its time alone in its fastest size, the other steps b each.

Steps 2 to 4 look at each size, or, for many lengths on many ranks, at intervals of sizes: of every interval a time that
is not above that of any size in it, and room where one of them has it. That rules out less and makes the least smaller.

The bound is the larger of 3 and 4, and `at_most` if that is smaller. Held by tests: never above the optimum of
`dyncp.testing.exhaustive`, nor above plans of the smallest sizes side by side on up to 300 ranks.
"""

import numpy as np

from dyncp.planning.problem import Problem


def lower_bound(problem: Problem, at_most: float) -> float:
    """Return a lower bound of any plan's seconds; `at_most` are the seconds of a known plan."""
    if not len(problem.lengths):
        return at_most
    least, steps = problem.least_base, problem.min_steps
    longest = at_most - (steps - 1) * least
    # A little longer than exactly: sums of floats must not rule out the known plan's own sizes.
    alone, rank_seconds = problem.intervals
    allowed = alone <= longest * (1 + 1e-9)
    work = np.where(allowed, rank_seconds, np.inf).min(axis=0)
    if not np.isfinite(work).all():
        return at_most  # no size is left for some sequence: nothing is faster than the known plan
    by_work = steps * least + float(work @ problem.counts) / problem.world_size
    by_length = float(alone.min(axis=0).max()) + (steps - 1) * least
    return min(at_most, max(by_work, by_length) * (1 - 1e-12))

"""Candidate plans for any number of sequences: groups of one size, and groups of many. Plain Python over floats.

Static, one candidate a size s:
1. At least ceil(tokens / (room of a group x W / s)) steps are needed. In so many, deal the sequences longest first,
   each to the least loaded group that has room.
2. Where one finds no room, `seqpack.pack` fills groups by tokens alone: never more steps than `plan_micro_batches`
   takes, which packs alike. Deal once more in that many; else keep the fullest groups for all steps but one, and deal
   what is left evenly in that one.
3. Sort the groups by their time and take W / s at a time as a step: no other way to form steps has a smaller sum.

Dynamic, one candidate a target time for a step:
1. For every sequence, the smallest size that holds it and meets the target: short ones stay whole on one rank.
2. Widest first, put the long ones into an open group that stays within the target, or open a group in the first step
   with ranks left.
3. Deal the short ones to the ranks left over (and into the room of wide groups), as in the static case; where they do
   not fit, pack them; where that needs more ranks, add a step.
4. Give idle ranks to the slowest group of each step as long as that makes it faster.

Held by tests: every sequence once, no group above its room, no step above the world's ranks.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from dyncp.planning.problem import Bin, CandidatePlan, Problem
from dyncp.planning.sizes import ceil_div

RECENT = 32  # open groups that are looked at for one more sequence


def static_candidate(problem: Problem, size: int) -> CandidatePlan:
    """Return a plan of groups of one size, in as few steps as packing allows; groups of like time share a step."""
    groups = problem.world_size // size
    tokens, _ = problem.columns(size)
    fewest = max(1, ceil_div(sum(tokens), problem.room(size) * groups))
    bins = _balance(problem, problem.order, [Bin(size, problem.room(size)) for _ in range(fewest * groups)])
    if bins is None:
        packed = problem.packed(size, problem.order)
        steps = ceil_div(len(packed), groups)
        if steps > fewest:
            bins = _balance(problem, problem.order, [Bin(size, problem.room(size)) for _ in range(steps * groups)])
        bins = bins or _packed(problem, problem.order, size, steps * groups, groups)
    return group_into_steps(problem, bins, groups, f"static-{size}")


def static_bound(problem: Problem, size: int) -> float:
    """Return a lower bound of static plans of this size: perfect balance in as few steps as the tokens need."""
    tokens, seconds = problem.column_arrays(size)
    groups = problem.world_size // size
    steps = max(1, ceil_div(int(tokens.sum()), groups * problem.room(size)))
    return steps * problem.table[size].base + float(seconds.sum()) / groups


def group_into_steps(problem: Problem, bins: Sequence[Bin], groups: int, name: str) -> CandidatePlan:
    """Return the plan of bins of one size, sorted by time, `groups` a step: the least sum of the steps' maxima."""
    bins = sorted((b for b in bins if b.samples), key=lambda b: -b.seconds)
    return problem.candidate([bins[i : i + groups] for i in range(0, len(bins), groups)] or [[]], name)


def dynamic_candidates(problem: Problem, targets: Sequence[float]) -> Iterator[CandidatePlan]:
    """Yield a candidate for each target, ascending; none where it equals the one before, or is static."""
    before: tuple[list[int], bool] = [], False
    for target in targets:
        wanted = _wanted_sizes(problem, target)
        if before != (wanted, True) and max(wanted, default=1) > 1:
            yield _dynamic_candidate(problem, target, wanted)
        before = wanted, target >= max(_fullest_seconds(problem, size) for size in set(wanted))


def _fullest_seconds(problem: Problem, size: int) -> float:
    """Return an upper bound of the seconds of a group of this size: full of sequences with most pairs a token."""
    room = problem.room(size)
    return problem.table[size].seconds(room, room * float((problem.pairs / problem.lengths).max(initial=0)))


def _dynamic_candidate(problem: Problem, target: float, wanted: list[int]) -> CandidatePlan:
    """Return a plan of the smallest groups within `target` seconds a step: only long sequences spread over ranks."""
    steps = _place_long(problem, [i for i in problem.order if wanted[i] > 1], wanted, target)
    steps = _place_short(problem, [i for i in problem.order if wanted[i] == 1], steps)
    for step in steps:
        grow_slowest(problem, step)
    return problem.candidate(steps, "dynamic")


def _balance(problem: Problem, samples: Sequence[int], bins: list[Bin]) -> list[Bin] | None:
    """Put samples, longest first, each into the least loaded bin with room; return None where one has no room.

    A bin without room for a sequence waits, widest room first, until a sequence is short enough for it again.
    """
    columns = {size: problem.columns(size) for size in {b.size for b in bins}}
    heap = [(problem.bin_seconds(b), i) for i, b in enumerate(bins)]
    heapify(heap)
    waiting: list[tuple[int, int, float]] = []
    for sample in samples:
        while waiting and -waiting[0][0] >= columns[bins[waiting[0][1]].size][0][sample]:
            _, i, loaded = heappop(waiting)
            heappush(heap, (loaded, i))
        while heap:
            loaded, i = heappop(heap)
            b = bins[i]
            tokens, seconds = columns[b.size]
            if tokens[sample] <= b.room:
                break
            heappush(waiting, (-b.room, i, loaded))
        else:
            return None
        b.room -= tokens[sample]
        b.seconds += seconds[sample]
        b.samples.append(sample)
        heappush(heap, (loaded + seconds[sample], i))
    return bins


def _packed(problem: Problem, samples: Sequence[int], size: int, slots: int, last: int) -> list[Bin]:
    """Return at most `slots` bins, which must suffice, as full as possible. The samples of the last `last` bins are
    then divided evenly among them, so that all slack is in one step."""
    packing = problem.packed(size, samples)
    full = [problem.bin_of(size, members) for members in packing[: slots - last]]
    rest = {i for members in packing[slots - last :] for i in members}
    longest_first = [i for i in samples if i in rest]
    dealt = _balance(problem, longest_first, [Bin(size, problem.room(size)) for _ in range(last)])
    return full + (dealt or [problem.bin_of(size, members) for members in packing[slots - last :]])


def _wanted_sizes(problem: Problem, target: float) -> list[int]:
    """Return, for each sequence, the smallest size that holds it within the target; else the fastest that holds it."""
    seconds = problem.seconds_alone
    meets = seconds <= target
    places = np.where(meets.any(axis=0), meets.argmax(axis=0), seconds.argmin(axis=0))
    wanted: list[int] = problem.size_array[places][problem.distinct[1]].tolist()
    return wanted


def _place_long(problem: Problem, samples: list[int], wanted: list[int], target: float) -> list[list[Bin]]:
    """Place sequences, widest first: in an open group that stays within the target, else in a new group of the first
    step with ranks left."""
    samples.sort(key=lambda i: -wanted[i])
    steps: list[list[Bin]] = []
    free: list[int] = []
    opened: list[Bin] = []
    columns = {size: (problem.table[size].base, *problem.columns(size)) for size in {wanted[i] for i in samples}}
    last = min(samples, key=lambda i: problem.lengths[i], default=0)
    # A group that has no room or no time for the shortest of them is not looked at any more.
    full = {size: (tokens[last], target - base - seconds[last]) for size, (base, tokens, seconds) in columns.items()}
    first, at = 0, 0  # no step before `first` has ranks for a group of size `at`: sizes never grow again
    for sample in samples:
        for b in opened[-RECENT:]:
            base, tokens, seconds = columns[b.size]
            if tokens[sample] <= b.room and base + b.seconds + seconds[sample] <= target:
                break
        else:
            size = wanted[sample]
            b = Bin(size, problem.room(size))
            if size != at:
                first, at = 0, size
            while first < len(free) and free[first] < size:
                first += 1
            if first == len(steps):
                steps.append([])
                free.append(problem.world_size)
            steps[first].append(b)
            free[first] -= size
            opened.append(b)
            _, tokens, seconds = columns[size]
        b.room -= tokens[sample]
        b.seconds += seconds[sample]
        b.samples.append(sample)
        least, latest = full[b.size]
        if b.room < least or b.seconds > latest:
            opened.remove(b)
    return steps


def _place_short(problem: Problem, samples: list[int], steps: list[list[Bin]]) -> list[list[Bin]]:
    """Place short sequences on the free ranks (and in the room of wide groups), adding steps until they fit."""
    wide = [b for step in steps for b in step]
    known = [(b.room, b.seconds, list(b.samples)) for b in wide]
    total = int(problem.lengths[samples].sum()) if samples else 0
    while True:
        singles = sum(problem.world_size - sum(b.size for b in step) for step in steps)
        bins: list[Bin] | None = None
        if total <= singles * problem.room(1) + sum(room for room, _, _ in known):
            new = [Bin(1, problem.room(1)) for _ in range(singles)]
            bins = _balance(problem, samples, [*wide, *new])
            if bins is None:  # as full as can be, then: by tokens alone
                for b, (room, seconds, members) in zip(wide, known, strict=True):
                    b.room, b.seconds, b.samples = room, seconds, list(members)
                if len(problem.packed(1, samples)) <= singles:
                    packed = _packed(problem, samples, 1, singles, min(singles, problem.world_size))
                    bins = [*wide, *packed, *(Bin(1, problem.room(1)) for _ in range(singles - len(packed)))]
        if bins is not None:
            break
        steps.append([])
    singles_left = sorted(bins[len(wide) :], key=lambda b: b.seconds)
    for step in sorted(steps, key=problem.step_seconds, reverse=True):
        for _ in range(problem.world_size - sum(b.size for b in step)):
            step.append(singles_left.pop())
    used = [[b for b in step if b.samples] for step in steps]
    return [step for step in used if step] or [[]]


def grow_slowest(problem: Problem, step: list[Bin]) -> None:
    """Add idle ranks to the slowest group as long as that makes it faster."""
    idle = problem.world_size - sum(b.size for b in step)
    while idle and step:
        slowest = max(step, key=problem.bin_seconds)
        wider = [problem.bin_of(size, slowest.samples) for size in problem.sizes if 0 < size - slowest.size <= idle]
        best = min((b for b in wider if b.room >= 0), key=problem.bin_seconds, default=slowest)
        if problem.bin_seconds(best) >= problem.bin_seconds(slowest):
            return
        idle -= best.size - slowest.size
        slowest.size, slowest.room, slowest.seconds = best.size, best.room, best.seconds

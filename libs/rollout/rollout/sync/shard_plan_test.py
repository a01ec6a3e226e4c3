"""The plan of a weight sync over any cuts of any tensors: every element once, from who holds it, evenly, in bounds."""

import math
from collections import Counter, defaultdict
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.sync.boxes import Box
from rollout.sync.manifest import TensorSpec
from rollout.sync.shard_plan import ALIGN, Shard, SyncPlan, plan_sync, plan_transfers

DTYPES = [torch.float32, torch.bfloat16, torch.uint8]


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A grid of boxes that fills a tensor: each dimension is cut somewhere."""
    edges = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    boxes = product(*(list(pairwise(line)) for line in edges))
    return [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in boxes]


@st.composite
def syncs(draw: st.DrawFn) -> tuple[list[TensorSpec], list[Shard], list[Shard], int]:
    """Tensors, each cut in two or three ways among ranks 0..3, and wanted in cuts of their own by 2..6."""
    count = draw(st.integers(1, 3))
    shapes = [tuple(draw(st.lists(st.integers(1, 7), max_size=3))) for _ in range(count)]
    specs = [TensorSpec(f"t{i}", shape, draw(st.sampled_from(DTYPES))) for i, shape in enumerate(shapes)]
    held: list[Shard] = []
    wanted: list[Shard] = []
    for spec in specs:
        for _ in range(draw(st.integers(1, 3))):
            held += [Shard(draw(st.integers(0, 3)), spec.name, box) for box in draw(cuts(spec.shape))]
        for process in draw(st.sets(st.integers(2, 6), max_size=3)):
            boxes = draw(cuts(spec.shape))
            wanted += [Shard(process, spec.name, box) for box in boxes if draw(st.booleans())]
    return specs, held, wanted, draw(st.integers(ALIGN, 200))


def counted(shape: tuple[int, ...], boxes: list[Box]) -> torch.Tensor:
    seen = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        seen[box.index] += 1
    return seen


def sent(plan: SyncPlan) -> list[tuple[int, int, str, Box]]:
    return [(b.source, b.target, name, box) for every in plan.rounds for b in every for name, box, _ in b.parts]


@settings(max_examples=300, deadline=None)
@given(syncs())
def test_every_wanted_element_comes_once_from_a_rank_that_holds_it(
    sync: tuple[list[TensorSpec], list[Shard], list[Shard], int],
) -> None:
    specs, held, wanted, most = sync
    plan = plan_sync(specs, held, wanted, most)
    shapes = {spec.name: spec.shape for spec in specs}
    got: defaultdict[tuple[int, str], list[Box]] = defaultdict(list)
    for source, target, name, box in sent(plan):
        owned = counted(shapes[name], [one.box for one in held if (one.process, one.tensor) == (source, name)])
        assert bool((owned[box.index] > 0).all()), "it sends what it does not hold"
        got[target, name].append(box)
        local = counted(shapes[name], [one.box for one in held if (one.process, one.tensor) == (target, name)])
        assert source == target or not bool((local[box.index] > 0).any()), "what is there already travels"
    for target, name in got.keys() | {(one.process, one.tensor) for one in wanted}:
        asked = [one.box for one in wanted if (one.process, one.tensor) == (target, name)]
        assert torch.equal(counted(shapes[name], got[target, name]), counted(shapes[name], asked))


@settings(max_examples=200, deadline=None)
@given(syncs())
def test_buckets_are_bounded_and_a_process_has_one_of_each_way_in_a_round(
    sync: tuple[list[TensorSpec], list[Shard], list[Shard], int],
) -> None:
    specs, held, wanted, most = sync
    plan = plan_sync(specs, held, wanted, most)
    sizes = {spec.name: spec.dtype.itemsize for spec in specs}
    for every in plan.rounds:
        assert every
        assert max(Counter(one.source for one in every).values()) == 1
        assert max(Counter(one.target for one in every).values()) == 1
        for bucket in every:
            end = 0
            for name, box, start in bucket.parts:
                assert start % ALIGN == 0
                assert start >= end
                end = start + box.numel * sizes[name]
            assert end == bucket.nbytes <= most
    counts = Counter(("out", b.source) for every in plan.rounds for b in every)
    counts.update(("in", b.target) for every in plan.rounds for b in every)
    # Greedy matchings of a bipartite multigraph need less than twice the rounds of the best, its largest degree.
    assert len(plan.rounds) < 2 * max(counts.values(), default=1) + 1


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(ALIGN, 100))
def test_ranks_that_hold_the_same_send_the_same_but_for_one_piece(ranks: int, rows: list[int], most: int) -> None:
    specs = [TensorSpec(f"t{i}", (n, 2), torch.float32) for i, n in enumerate(rows)]
    held = [Shard(rank, one.name, Box.whole(one.shape)) for rank in range(ranks) for one in specs]
    wanted = [Shard(ranks, one.name, Box.whole(one.shape)) for one in specs]
    load = Counter(dict.fromkeys(range(ranks), 0))
    named = {one.name: one for one in specs}
    for source, _, _, box in plan_transfers(named, held, wanted, most):
        load[source] += 4 * box.numel
    assert max(load.values()) - min(load.values()) <= most


def test_two_machines_exchange_halves_in_both_directions_at_once() -> None:
    """Of ranks that have a sampler each, every one takes the other's shard while it sends its own."""
    spec = TensorSpec("w", (8, 4), torch.float32)
    held = [Shard(rank, "w", Box((4 * rank, 0), (4, 4))) for rank in range(2)]
    wanted = [Shard(rank, "w", Box.whole(spec.shape)) for rank in range(2)]
    plan = plan_sync([spec], held, wanted, 64)
    assert plan.bytes_of(0) == plan.bytes_of(1) == (64, 64)
    assert plan.pairs == [(0, 1), (1, 0)]
    assert len(plan.rounds) == 2, "one in which each copies its own, one in which they exchange"


def test_what_nobody_holds_is_refused_by_name_and_place() -> None:
    spec = TensorSpec("w", (8, 4), torch.float32)
    held = [Shard(0, "w", Box((0, 0), (3, 4)))]
    with pytest.raises(ValueError, match=r"no rank holds w\[3, 0\], \[5, 4\] elements"):
        plan_sync([spec], held, [Shard(1, "w", Box.whole(spec.shape))], 1024)
    with pytest.raises(ValueError, match="'v', which is none of the tensors"):
        plan_sync([spec], [Shard(0, "v", Box((0,), (1,)))], [], 1024)
    with pytest.raises(ValueError, match="lies outside w"):
        plan_sync([spec], [Shard(0, "w", Box((6, 0), (3, 4)))], [], 1024)
    with pytest.raises(ValueError, match="max_bytes must be at least 16"):
        plan_sync([spec], held, [], 8)


boxes = st.lists(st.integers(0, 5), min_size=1, max_size=3).flatmap(
    lambda start: st.tuples(st.just(start), st.lists(st.integers(1, 5), min_size=len(start), max_size=len(start)))
)


@given(boxes, st.data())
def test_boxes_cut_and_subtract_without_a_gap(made: tuple[list[int], list[int]], data: st.DataObject) -> None:
    box = Box(tuple(made[0]), tuple(made[1]))
    shape = tuple(a + n for a, n in zip(*made, strict=True))
    most = data.draw(st.integers(1, 30))
    parts = list(box.cut(most))
    assert torch.equal(counted(shape, parts), counted(shape, [box]))
    assert all(part.numel <= most for part in parts)
    start = tuple(data.draw(st.integers(a, a + n - 1)) for a, n in zip(*made, strict=True))
    size = tuple(data.draw(st.integers(1, b + n - a)) for a, b, n in zip(start, *made, strict=True))
    hole = Box(start, size)
    assert torch.equal(counted(shape, [hole, *box.without(hole)]), counted(shape, [box]))
    assert box.overlap(hole) == hole
    assert math.prod(hole.within(box).size) == hole.numel

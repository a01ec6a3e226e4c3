import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpack.planning.micro_batches import MicroBatchPlan, plan_micro_batches
from seqpack.planning.mixes import MIXES
from seqpack.planning.packing import pack
from seqpack.planning.padding import Bucket, packed_geometry, usable_capacity


def quadratic(length: int) -> float:
    return 3000.0 * length + length * length


@given(
    st.lists(st.one_of(st.integers(1, 100), st.sampled_from([33, 50, 60, 100])), max_size=50),
    st.integers(100, 250),
    st.integers(1, 5),
    st.sampled_from([None, quadratic, lambda s: 1.0 / s, lambda s: 0.0]),
    st.sampled_from(["none", "siblings", "any"]),
    st.sampled_from([(1, None), (4, None), (1, 16), (4, 12), (4, (128, 64, 100))]),
    st.integers(1, 3),
    st.data(),
)
def test_cap_counts_and_every_sample_once(
    lengths: list[int],
    cap: int,
    dp: int,
    cost: Callable[[int], float] | None,
    grouping: str,
    padding: tuple[int, Bucket],
    multiple: int,
    data: st.DataObject,
) -> None:
    align, bucket = padding
    usable = usable_capacity(cap, align, bucket)
    lengths = [min(length, usable) for length in lengths]
    groups = [i // 4 for i in range(len(lengths))] if grouping == "siblings" else None
    if grouping == "any":
        groups = data.draw(st.lists(st.integers(-3, 3), min_size=len(lengths), max_size=len(lengths)))
    options: dict[str, Any] = {"groups": groups, "align": align, "bucket": bucket, "count_multiple": multiple}
    plan = plan_micro_batches(lengths, cap, dp, cost, **options)
    assert len(plan.ranks) == dp
    assert {len(rank) for rank in plan.ranks} == {plan.num_micro_batches}
    assert plan.num_micro_batches % multiple == 0
    batches = [mb for rank in plan.ranks for mb in rank]
    assert sorted(i for mb in batches for i in mb) == list(range(len(lengths)))
    aligned = [-(-n // align) * align for n in lengths]
    assert all(sum(aligned[i] for i in mb) <= cap for mb in batches)
    rows = [[packed_geometry([lengths[i] for i in mb], align, bucket).total for mb in rank] for rank in plan.ranks]
    assert plan.tokens == tuple(map(tuple, rows))
    assert max(map(max, rows)) <= cap
    if groups is not None:
        homes = {g: {b for b, mb in enumerate(batches) for i in mb if groups[i] == g} for g in groups}
        assert all(len(home) == 1 for g, home in homes.items() if g not in plan.split_groups)
        totals = {g: sum(n for n, h in zip(aligned, groups, strict=True) if h == g) for g in groups}
        assert sorted(plan.split_groups) == sorted(g for g, total in totals.items() if total > usable)
    again = plan_micro_batches(lengths, cap, dp, cost, **options)
    assert again == plan
    assert again.hash == plan.hash
    assert MicroBatchPlan.from_json(plan.to_json()) == plan
    assert 0 <= plan.hash < 2**52


def test_a_cap_that_only_counting_tokens_would_break() -> None:
    # 180 tokens over 100 would fit in two micro-batches if samples could be cut.
    plan = plan_micro_batches([60, 60, 60], 100)
    assert plan.ranks == (((0,), (1,), (2,)),)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("count", "dp", "cap"), [(512, 8, 32768), (700, 16, 16384), (1500, 4, 65536)])
def test_training_mixes_are_balanced_in_the_fewest_micro_batches(mix: str, count: int, dp: int, cap: int) -> None:
    lengths = MIXES[mix](count, 16384).tolist()
    for cost in (None, lambda s: 24576.0 * s + s * s):
        plan = plan_micro_batches(lengths, cap, dp, cost)
        assert max(t for rank in plan.tokens for t in rank) <= cap
        assert plan.num_micro_batches == -(-len(pack(lengths, cap).bins) // dp)
        # One sample as long as the cap fills a micro-batch that costs more than any of shorter ones: the cap's price.
        assert plan.max_over_mean <= (1.1 if cap == 16384 else 1.02)


def test_few_samples_leave_some_ranks_with_empty_micro_batches() -> None:
    plan = plan_micro_batches([5, 3], 8, dp_size=4)
    assert plan.num_micro_batches == 1
    assert sorted(plan.ranks) == [((),), ((),), ((0,),), ((1,),)]
    empty = plan_micro_batches([], 8, dp_size=2)
    assert empty.ranks == (((),), ((),))
    assert empty.max_over_mean == 1.0


def test_groups_stay_together_and_long_ones_are_reported() -> None:
    plan = plan_micro_batches([4] * 8 + [6, 6], 16, groups=[0, 1] * 4 + [7, 7])
    homes = {i: b for b, mb in enumerate(plan.ranks[0]) for i in mb}
    assert len({homes[i] for i in (0, 2, 4, 6)}) == len({homes[i] for i in (1, 3, 5, 7)}) == 1
    assert homes[8] == homes[9]
    assert plan.split_groups == ()
    split = plan_micro_batches([4] * 8 + [9, 9], 16, groups=[0, 1] * 4 + [7, 7])
    assert split.split_groups == (7,)


def test_ranks_that_run_together_have_similar_costs() -> None:
    plan = plan_micro_batches(MIXES["bimodal"](512, 16384).tolist(), 32768, 8, quadratic)
    levels = [max(level) / min(level) for level in zip(*plan.loads, strict=True)]
    assert sorted(levels)[len(levels) // 2] < 1.05
    totals = [sum(rank) for rank in plan.loads]
    assert max(totals) / min(totals) < 1.05


def test_the_hash_is_the_same_in_every_process_and_tells_plans_apart() -> None:
    code = (
        "from seqpack.planning.micro_batches import plan_micro_batches as p;"
        "print(p([7, 5, 3, 9, 1, 4], 12, 2, lambda s: s * s, groups=[0, 0, 1, 1, 2, 2]).hash)"
    )
    hashes = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONHASHSEED": seed}
        hashes.add(
            subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
        )
    assert len(hashes) == 1
    assert len({plan_micro_batches([n, 3], 8).hash for n in range(1, 9)}) == 8


@pytest.mark.parametrize(("mix", "most"), [("lognormal", 1.0005), ("bimodal", 1.003), ("truncated", 1.0005)])
def test_ranks_wait_little_for_one_another(mix: str, most: float) -> None:
    lengths = MIXES[mix](2048, 16384).tolist()
    plan = plan_micro_batches(lengths, 32768, 8, lambda s: 24576.0 * s + s * s)
    assert plan.max_over_mean <= most


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plan_micro_batches([3, 9], 8), r"lengths\[1\] = 9 does not fit in 8"),
        (lambda: plan_micro_batches([3, 9], 9, align=4), r"lengths aligned to 4\[1\] = 12 does not fit in 8"),
        (lambda: plan_micro_batches([3, 9], 15, bucket=8), r"lengths\[1\] = 9 does not fit in 8"),
        (lambda: plan_micro_batches([3], 15, bucket=16), "the smallest bucket 16 is over the capacity 15"),
        (lambda: plan_micro_batches([3], 15, align=4, bucket=6), "bucket 6 is not a multiple of align 4"),
        (lambda: plan_micro_batches([3, 0], 8), r"lengths\[1\] must be at least 1"),
        (lambda: plan_micro_batches([3, -2], 8), r"lengths\[1\] must be at least 1, got -2"),
        (lambda: plan_micro_batches([3, 1.5], 8), r"lengths\[1\] must be an integer, got 1.5"),  # type: ignore[list-item]
        (lambda: plan_micro_batches([3], 0), "max_tokens must be a positive integer"),
        (lambda: plan_micro_batches([3], 8, 0), "dp_size must be a positive integer"),
        (lambda: plan_micro_batches([3], 8, align=0), "align must be a positive integer"),
        (lambda: plan_micro_batches([3], 8, count_multiple=0), "count_multiple must be a positive integer"),
        (lambda: plan_micro_batches([3], 8, cost=lambda s: float("nan")), r"cost\[0\] must be finite"),
        (lambda: plan_micro_batches([3], 8, cost=[1.0, 2.0]), "2 costs for 1 lengths"),
        (lambda: plan_micro_batches([3], 8, groups=[1, 2]), "2 groups for 1 lengths"),
        (lambda: plan_micro_batches([3], 8, groups=["a"]), r"groups\[0\] must be an integer, got 'a'"),  # type: ignore[list-item]
        (lambda: plan_micro_batches([5, 5], 8, groups=[7, 7], long_groups="refuse"), "group 7 has 10 tokens"),
        (lambda: plan_micro_batches([5], 8, groups=[7], long_groups="drop"), "must be 'split' or 'refuse'"),  # type: ignore[arg-type]
        (lambda: MicroBatchPlan.from_json("{}"), "expected a plan of kind 'MicroBatchPlan', got None"),
        (lambda: MicroBatchPlan.from_json("nothing"), "not a plan"),
        (lambda: MicroBatchPlan.from_json('{"kind":"MicroBatchPlan","ranks":[]}'), "not a whole MicroBatchPlan"),
    ],
)
def test_bad_input_is_named(call: Callable[[], MicroBatchPlan], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_the_ranks_totals_even_out_over_the_micro_batches() -> None:
    """A level's costliest goes to the rank with least so far: totals differ by no more than one level's costs do."""
    rng = np.random.default_rng(0)
    for ranks in (2, 3, 8):
        lengths = rng.integers(60, 100, 12 * ranks)  # each alone in a micro-batch
        loads = plan_micro_batches(lengths, 100, ranks).loads
        assert len(loads[0]) == 12
        totals = list(map(sum, loads))
        assert max(totals) - min(totals) <= max(max(level) - min(level) for level in zip(*loads, strict=True))

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpack.micro_batches import MicroBatchPlan, plan_micro_batches


@given(
    st.lists(st.integers(1, 100), max_size=50),
    st.integers(100, 250),
    st.integers(1, 5),
    st.sampled_from([None, lambda s: s * s + 3.0]),
    st.booleans(),
    st.sampled_from([1, 4]),
    st.integers(1, 3),
)
def test_cap_counts_and_every_sample_once(lengths, cap, dp, cost, grouped, align, multiple) -> None:
    groups = [i // 4 for i in range(len(lengths))] if grouped else None
    options = {"groups": groups, "align": align, "count_multiple": multiple}
    plan = plan_micro_batches(lengths, cap, dp, cost, **options)
    assert len(plan.ranks) == dp
    assert {len(rank) for rank in plan.ranks} == {plan.num_micro_batches}
    assert plan.num_micro_batches % multiple == 0
    batches = [mb for rank in plan.ranks for mb in rank]
    assert sorted(i for mb in batches for i in mb) == list(range(len(lengths)))
    assert all(sum(-(-lengths[i] // align) * align for i in mb) <= cap for mb in batches)
    if groups is not None:
        homes = {g: {b for b, mb in enumerate(batches) for i in mb if groups[i] == g} for g in groups}
        assert all(len(home) == 1 for g, home in homes.items() if g not in plan.split_groups)
        totals = {
            g: sum(-(-n // align) * align for n, h in zip(lengths, groups, strict=True) if h == g) for g in groups
        }
        assert sorted(plan.split_groups) == sorted(g for g, total in totals.items() if total > cap)
    again = plan_micro_batches(lengths, cap, dp, cost, **options)
    assert again == plan
    assert again.hash == plan.hash
    assert MicroBatchPlan.from_json(plan.to_json()) == plan
    assert 0 <= plan.hash < 2**53


def test_fewer_samples_than_ranks() -> None:
    plan = plan_micro_batches([5, 3], 8, dp_size=4)
    assert plan.num_micro_batches == 1
    assert sorted(plan.ranks) == [((),), ((),), ((0,),), ((1,),)]


def test_hash_tells_plans_apart() -> None:
    hashes = {plan_micro_batches([n, 3], 8).hash for n in range(1, 9)}
    assert len(hashes) == 8


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plan_micro_batches([3, 9], 8), r"lengths\[1\] = 9 does not fit in 8"),
        (lambda: plan_micro_batches([3, 9], 9, align=4), r"lengths aligned to 4\[1\] = 12 does not fit in 9"),
        (lambda: plan_micro_batches([3, 0], 8), r"lengths\[1\] must be at least 1"),
        (lambda: plan_micro_batches([3], 0), "max_tokens must be a positive integer"),
        (lambda: plan_micro_batches([3], 8, 0), "dp_size must be a positive integer"),
        (lambda: plan_micro_batches([3], 8, count_multiple=0), "count_multiple must be a positive integer"),
        (lambda: plan_micro_batches([3], 8, cost=lambda s: float("nan")), r"cost\[0\] must be finite"),
        (lambda: plan_micro_batches([3], 8, cost=[1.0, 2.0]), "2 costs for 1 lengths"),
        (lambda: plan_micro_batches([3], 8, groups=[1, 2]), "2 groups for 1 lengths"),
        (lambda: plan_micro_batches([5, 5], 8, groups=[7, 7], long_groups="refuse"), "group 7 has 10 tokens"),
        (lambda: plan_micro_batches([5], 8, groups=[7], long_groups="drop"), "must be 'split' or 'refuse'"),
        (lambda: MicroBatchPlan.from_json("{}"), "expected a plan of kind 'MicroBatchPlan', got None"),
        (lambda: MicroBatchPlan.from_json("nothing"), "not a plan"),
    ],
)
def test_bad_input_is_named(call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runplan.layout.batches import bubble_share, plan_batches, span, split_evenly


@given(st.integers(1, 2000), st.integers(1, 20), st.integers(1, 64), st.integers(1, 100), st.integers(1, 400))
def test_no_sequence_is_lost_and_no_micro_batch_is_over_the_cap(
    sequences: int, mini_batches: int, dp: int, longest: int, tokens: int
) -> None:
    if longest > tokens or mini_batches > sequences:
        with pytest.raises(ValueError, match=r"does not fit|too few"):
            plan_batches(sequences, mini_batches, dp, longest, tokens)
        return
    plan = plan_batches(sequences, mini_batches, dp, longest, tokens)
    assert sum(sum(ranks) for ranks in plan.rank_sequences) == plan.sequences == sequences
    assert len(plan.rank_sequences) == mini_batches
    assert all(len(ranks) == dp for ranks in plan.rank_sequences)
    assert plan.sequences_per_micro_batch * longest <= tokens
    for ranks, count in zip(plan.rank_sequences, plan.micro_batches, strict=True):
        assert max(ranks) - min(ranks) <= 1
        assert (count - 1) * plan.sequences_per_micro_batch < max(ranks) <= count * plan.sequences_per_micro_batch
    assert 0 <= plan.idle_share < 1


@given(st.integers(0, 1000), st.integers(1, 50))
def test_an_even_split(total: int, parts: int) -> None:
    split = split_evenly(total, parts)
    assert len(split) == parts
    assert sum(split) == total
    assert max(split) - min(split) <= 1


def test_the_bubble_is_none_without_a_pipeline_and_shrinks_with_micro_batches_and_chunks() -> None:
    assert bubble_share(8, 1) == 0
    assert bubble_share(4, 4) == pytest.approx(3 / 7)
    assert bubble_share(8, 4) < bubble_share(4, 4)
    assert bubble_share(4, 4, chunks=2) == bubble_share(8, 4)


def test_a_span() -> None:
    assert (span([3, 3]), span([2, 3])) == ("3", "2 to 3")

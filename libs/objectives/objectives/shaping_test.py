"""Length shaping against the papers' formulas, written out for one answer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objectives.shaping import length_reward, overlong_filter, overlong_penalty


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 30), st.data())
def test_the_overlong_penalty_is_dapos_equation_13(lengths: list[int], longest: int, data: st.DataObject) -> None:
    buffer = data.draw(st.integers(1, longest))

    def formula(length: int) -> float:
        if length <= longest - buffer:
            return 0.0
        if length <= longest:
            return ((longest - buffer) - length) / buffer
        return -1.0

    got = overlong_penalty(torch.tensor(lengths), longest, buffer).tolist()
    assert got == pytest.approx([formula(length) for length in lengths], abs=1e-6)


def test_a_buffer_beyond_the_answer_is_refused() -> None:
    for buffer in (0, 11):
        with pytest.raises(ValueError, match="buffer must be a number from 1 to 10"):
            overlong_penalty(torch.tensor([3]), 10, buffer)


def test_the_filter_leaves_out_what_was_cut_off() -> None:
    rows = [torch.tensor([False, True, True]), torch.tensor([True, False]), torch.tensor([False, True])]
    mask = torch.nested.nested_tensor(rows, layout=torch.jagged)
    kept = overlong_filter(mask, torch.tensor([False, True, False]))
    assert [row.tolist() for row in kept.unbind()] == [[False, True, True], [False, False], [False, True]]


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans(), st.integers(0, 2)), min_size=1, max_size=9))
def test_the_length_reward_is_kimis(answers: list[tuple[int, bool, int]]) -> None:
    def formula(length: int, correct: bool, group: int) -> float:
        sizes = [size for size, _, other in answers if other == group]
        if min(sizes) == max(sizes):
            return 0.0
        share = 0.5 - (length - min(sizes)) / (max(sizes) - min(sizes))
        return share if correct else min(0.0, share)

    lengths, correct, groups = (torch.tensor(column) for column in zip(*answers, strict=True))
    got = length_reward(lengths, correct, groups).tolist()
    assert got == pytest.approx([formula(*answer) for answer in answers], abs=1e-6)

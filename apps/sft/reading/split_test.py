from random import Random

from hypothesis import given
from hypothesis import strategies as st

from apps.sft.reading.split import split_against, split_off

KEYS = st.lists(st.sampled_from("abcdefghij"), max_size=40)


@given(KEYS, st.floats(0.01, 0.99))
def test_a_share_loses_nothing_and_no_key_is_on_both_sides(keys: list[str], share: float) -> None:
    split = split_off(keys, share)
    assert sorted([*split.train, *split.held_out]) == list(range(len(keys)))
    assert not {keys[i] for i in split.train} & {keys[i] for i in split.held_out}
    assert not split.removed
    if keys:
        different = len(set(keys))
        assert len({keys[i] for i in split.held_out}) == max(1, round(different * share))


@given(KEYS, KEYS)
def test_a_held_out_file_removes_exactly_the_identical_rows(keys: list[str], held_out: list[str]) -> None:
    split = split_against(keys, held_out)
    assert sorted([*split.train, *split.removed]) == list(range(len(keys)))
    assert split.held_out == tuple(range(len(held_out)))
    assert all(keys[i] in held_out for i in split.removed)
    assert not any(keys[i] in held_out for i in split.train)


@given(KEYS, st.floats(0.01, 0.99), st.randoms())
def test_the_order_of_the_rows_makes_no_difference(keys: list[str], share: float, random: Random) -> None:
    chosen = {keys[i] for i in split_off(keys, share).held_out}
    random.shuffle(keys)
    assert {keys[i] for i in split_off(keys, share).held_out} == chosen

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from apps.common.data.held_out import held_out_keys


@given(st.lists(st.text(max_size=8), min_size=1, max_size=50), st.floats(0.01, 0.99), st.randoms())
def test_the_share_is_kept_whatever_the_order(keys: list[str], share: float, random: Random) -> None:
    chosen = held_out_keys(keys, share)
    assert chosen <= set(keys)
    assert len(chosen) == max(1, round(len(set(keys)) * share))
    random.shuffle(keys)
    assert held_out_keys(keys, share) == chosen

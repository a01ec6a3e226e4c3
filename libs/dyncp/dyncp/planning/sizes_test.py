"""The seed's rule, and the arithmetic of shards."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp.planning.sizes import LAYOUTS, group_room, local_cp_size, local_tokens, rank_align, sequence_align


@pytest.mark.parametrize(("needed", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16)])
def test_sizes_go_up_to_a_power_of_two(needed: int, size: int) -> None:
    assert local_cp_size(needed * 100, 100, 16) == size
    assert local_cp_size(needed * 100 - 99, 100, 16) == size


def test_the_world_bounds_the_size() -> None:
    assert local_cp_size(500, 100, 6) == 6
    assert local_cp_size(600, 100, 6) == 6
    with pytest.raises(ValueError, match="raise max_tokens_per_rank to 101"):
        local_cp_size(601, 100, 6)
    with pytest.raises(ValueError, match="positive"):
        local_cp_size(0, 100, 6)


@given(st.integers(1, 10**6), st.integers(1, 10**4), st.integers(1, 512))
def test_the_size_is_the_smallest_that_fits(longest: int, cap: int, world: int) -> None:
    if longest > cap * world:
        with pytest.raises(ValueError, match="ranks"):
            local_cp_size(longest, cap, world)
        return
    size = local_cp_size(longest, cap, world)
    assert longest <= size * cap
    assert size == world or size & (size - 1) == 0
    assert size == 1 or longest > (size // 2) * cap or size == world


def test_local_tokens_counts_padding() -> None:
    assert sequence_align(1, "zigzag") == 1
    assert local_tokens([7, 3, 17], 2, "zigzag") == (8 + 4 + 20) // 2
    assert local_tokens([7, 3, 17], 2, "contiguous") == 14
    assert local_tokens([], 4, "zigzag") == 0
    with pytest.raises(ValueError, match="choose one of contiguous, zigzag"):
        local_tokens([1], 2, "striped")  # type: ignore[arg-type]


def test_the_room_of_a_group_is_the_most_that_its_ranks_hold() -> None:
    """Room and padding are two sides of one rule: what fills the room fits, one more unit of a sequence does not."""
    for cp_size, layout, align, cap in itertools.product((1, 2, 3, 4), LAYOUTS, (1, 2, 3, 16), (16, 17, 31, 100)):
        room = group_room(cp_size, cap, layout, align)
        held = local_tokens([room], cp_size, layout, align)
        assert held * cp_size == room
        assert cap - align * 2 < held <= cap
        assert held % align == 0
        assert local_tokens([room + sequence_align(cp_size, layout)], cp_size, layout, align) > cap


def test_zigzag_gives_each_rank_two_halves() -> None:
    assert [rank_align(size, "zigzag", 3) for size in (1, 2, 4)] == [3, 6, 6]
    assert [rank_align(size, "contiguous", 3) for size in (1, 2, 4)] == [3, 3, 3]
    assert rank_align(2, "zigzag", 16) == 16
    assert local_tokens([5], 1, "contiguous") == 5

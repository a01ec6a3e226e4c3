import pytest

from apps.common.run.ranks import ranks_of_node
from schedules.runtime.collectives import broadcast_result, gather_lists, rank_and_world


def test_torchrun_says_how_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks_of_node(3, 2) == 3
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert ranks_of_node(1, 1) == 8
    assert ranks_of_node(1, 2) == 4
    with pytest.raises(ValueError, match=r"8 ranks, which 3 nodes.*--pools\.nodes"):
        ranks_of_node(1, 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ranks_of_node(1, 2) == 4
    with pytest.raises(ValueError, match=r"4 of 8 ranks here, and the rest elsewhere: set --pools\.nodes"):
        ranks_of_node(1, 1)


def test_without_a_group_there_is_one_rank() -> None:
    assert rank_and_world() == (0, 1)
    assert gather_lists([1, 2]) == [1, 2]
    assert broadcast_result("x") == "x"

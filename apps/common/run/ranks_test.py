import subprocess
import sys

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


def test_a_rank_and_its_threads_compute_without_denormal_numbers() -> None:
    """A delta net's decays end below 1e-38: a step of 64 rows of 18 tokens took a fifth longer with them."""
    code = """
import threading, torch
from apps.common.run.ranks import init_rank
init_rank(1, 0)
found = []
thread = threading.Thread(target=lambda: found.append((torch.tensor(1e-30) * 1e-10).item()))
thread.start(); thread.join()
print(*found, (torch.tensor(1e-30) * 1e-10).item(), (torch.tensor(1e-30) * 1e-7).item() > 0)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["0.0", "0.0", "True"]

"""Ranks of an outer launcher: a silent one is named, with its stack, and ends all.

Real processes: of torchrun, whose agent has the store, and with its variables alone, as srun's, where rank 0 has it.
What takes longer is in `heartbeats_long_test`.
"""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.testing.launched_ranks import SECONDS, Ranks, launched_ranks
from engines.testing.stalled_ranks import STALL

HOST = socket.gethostname()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with launched_ranks(tmp_path) as started:
        yield started


def named(rank: int, pid: int, by: int) -> str:
    return f"rank {rank} (process {pid} on {HOST}) said nothing for {STALL:g} s, as rank {by} noticed: the run ends."


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("launcher", ["torchrun", "separate"])
def test_a_rank_that_is_stopped_is_named_and_ends_the_run(ranks: Ranks, launcher: str, rank: int) -> None:
    getattr(ranks, launcher)("stopped", rank)
    codes, text = ranks.wait() if (launcher, rank) != ("separate", 0) else _first_stopped(ranks)
    assert all(codes), text
    assert not list(ranks.folder.glob("end*")), text
    if (launcher, rank) == ("separate", 0):
        assert "of rank 0 or what started it, said nothing for 6 s" in text
    else:
        assert named(rank, ranks.pids()[rank], 1 - rank) in text


def _first_stopped(ranks: Ranks) -> tuple[list[int], str]:
    """Wait for rank 1, whose store stopped with rank 0; srun kills a task that is left (--kill-on-bad-exit)."""
    code = ranks.processes[1].wait(SECONDS)
    ranks.processes[0].kill()
    return [code, ranks.processes[0].wait()], ranks.text


def test_a_rank_that_hangs_says_where(ranks: Ranks) -> None:
    ranks.torchrun("holds_the_interpreter", 1, 3)
    codes, text = ranks.wait()
    assert codes == [1], text
    assert "said nothing for 6 s, as rank 0 noticed" in text
    assert "in holds_the_interpreter" in text

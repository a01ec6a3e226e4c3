"""Ranks of an outer launcher that are slow, or have ended, or were all stopped: they end nothing."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.testing.launched_ranks import Ranks, launched_ranks
from engines.testing.stalled_ranks import SLOW


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with launched_ranks(tmp_path) as started:
        yield started


def test_a_loop_of_python_is_shown_once_the_others_waited_too_long(ranks: Ranks) -> None:
    """It beats, as a rank does that compiles: only the collective's time says that it is too slow."""
    ranks.torchrun("loops_for_ever", 2, 3)
    codes, text = ranks.wait()
    assert codes == [1], text
    assert "said nothing" not in text
    (told,) = [part for part in text.split("waited too long for others")[1:] if "in loops_for_ever" in part]
    assert "rank 2:" in told.split("\n")


@pytest.mark.parametrize("launcher", ["torchrun", "separate"])
@pytest.mark.parametrize(("case", "rank"), [("is_slow", 1), ("ends_first", 0), ("ends_first", 1)])
def test_a_slow_rank_and_one_that_has_ended_end_nothing(ranks: Ranks, launcher: str, case: str, rank: int) -> None:
    getattr(ranks, launcher)(case, rank)
    codes, text = ranks.wait()
    assert not any(codes), text
    assert len(list(ranks.folder.glob("end*"))) == 2
    assert "said nothing" not in text


def test_a_run_that_is_stopped_as_a_whole_goes_on(ranks: Ranks) -> None:
    ranks.torchrun("is_slow", 1)
    everyone = [*ranks.pids(), ranks.processes[0].pid]
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(SLOW)
    for pid in everyone:
        os.kill(pid, signal.SIGCONT)
    codes, text = ranks.wait()
    assert codes == [0], text

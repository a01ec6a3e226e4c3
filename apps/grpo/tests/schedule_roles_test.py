"""A fully asynchronous run that loses its rollout worker, or a rank that trains beside the first: nothing is skipped
and nothing trained twice. Here the points that matter most, one after the other in one run; each in a run of its own,
and the driver's, are `schedule_points_test`'s, which is of the long tier.
"""

from pathlib import Path

import pytest

from apps.common.testing.process_kills import run_in_child
from apps.grpo.testing.kill_points import RANK, WORKER, ended_at, kill_at_points
from apps.grpo.testing.ranks import go_on_ranks, on_ranks, sound
from apps.grpo.testing.schedules import ASYNC, assert_nothing_lost, go, nothing, rows, small
from engines.launch import RankError

ENDS = (
    "amid generation",
    "weights between prepare and commit",
    "weights after the commit",
)
"""No more than a run takes in a row: whether a group lies between two of them hangs on how fast the processes are."""
RANK_ENDS = ("a step before it is trained", "a checkpoint amid its writing")


def test_a_rollout_worker_killed_again_and_again_loses_nothing(tmp_path: Path) -> None:
    """The run goes on by itself: with its present weights, each process that takes over ends at the next point."""
    run_dir = tmp_path / "run"
    assert run_in_child(go, run_dir, ASYNC, sampler=kill_at_points(run_dir, WORKER, *ENDS), steps=8) == 0
    assert ended_at(run_dir, *ENDS) == list(ENDS)
    assert_nothing_lost(run_dir, small(run_dir, ASYNC, steps=8))
    assert [row["weights/version"] for row in rows(run_dir)[1:]] == list(range(1, 9))


def test_a_killed_training_rank_ends_the_run_which_goes_on(tmp_path: Path) -> None:
    """All ranks end, and are started again from the last checkpoint."""
    run_dir = tmp_path / "run"
    for killed in range(len(RANK_ENDS)):
        with pytest.raises(RankError, match="rank 1 died with exit code -9"):
            go_on_ranks(run_dir, nothing, kill_at_points(run_dir, RANK, *RANK_ENDS))
        assert len(ended_at(run_dir, *RANK_ENDS)) == killed + 1
    go_on_ranks(run_dir)
    sound(run_dir, on_ranks(run_dir))

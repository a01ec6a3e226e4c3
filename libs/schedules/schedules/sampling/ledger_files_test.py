"""Which schedule a run's ledgers belong to, and what is said to who goes on by another."""

import pytest

from schedules.config import Mode
from schedules.sampling.ledger_files import PER_RANK, SHARED, refusal

RANKS = [PER_RANK.format(0), PER_RANK.format(1)]
FOUND = {"sync": [], "one_step_off": RANKS, "fully_async": [SHARED]}


@pytest.mark.parametrize("after", FOUND)
@pytest.mark.parametrize("before", FOUND)
def test_a_run_goes_on_by_its_own_schedule_alone(before: Mode, after: Mode) -> None:
    world = 2 if after == "one_step_off" else 1
    found = refusal(FOUND[before], after, world, done=4)
    if before == after:
        assert found is None
    else:
        assert found is not None
        assert f"go on with --schedule.mode {before}" in found


def test_ranks_that_sampled_ahead_stay_as_many() -> None:
    assert (refusal(RANKS, "one_step_off", 1, 4) or "").endswith("go on with --nproc-per-node 2, not 1")
    assert (refusal(RANKS[:1], "one_step_off", 2, 4) or "").endswith("go on with --nproc-per-node 1, not 2")


@pytest.mark.parametrize("mode", FOUND)
def test_a_run_without_a_checkpoint_and_ledgers_begins_by_any(mode: Mode) -> None:
    assert refusal([], mode, 2, done=0) is None
